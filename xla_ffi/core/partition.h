// Ranges of elements and how a message is cut: message -> loops -> chunks -> slices.
#pragma once

#include <cstdint>

#include "xla_ffi/core/macros.h"

namespace jaxring {

// Elements [offset, offset + count) of a message.
struct Range {
  int64_t offset = 0;
  int64_t count = 0;
};

// Piece `index` of `whole` cut into `parts` nearly equal pieces: sizes differ by at most one
// element, so every rank can compute every other rank's piece, and a message shorter than `parts`
// has empty pieces.
JR_HOST_DEVICE JR_SMALL Range piece_of(Range whole, int64_t parts, int64_t index) {
  const int64_t base = whole.count / parts;
  const int64_t longer = whole.count % parts;  // the first `longer` pieces hold one element more
  const int64_t before = index * base + (index < longer ? index : longer);
  return Range{whole.offset + before, base + (index < longer ? 1 : 0)};
}

// A message processed in loops, so that one loop's chunks fit the FIFOs and successive loops
// overlap.
struct Loops {
  Range message;
  int64_t loop_count = 1;

  JR_HOST_DEVICE Range operator[](int64_t index) const {
    return piece_of(message, loop_count, index);
  }
};

// As few loops as keep each at or below `max_loop_elements`.
JR_HOST_DEVICE JR_SMALL Loops loops_of(Range message, int64_t max_loop_elements) {
  const int64_t loop_count = (message.count + max_loop_elements - 1) / max_loop_elements;
  return Loops{message, loop_count > 0 ? loop_count : 1};
}

}  // namespace jaxring
