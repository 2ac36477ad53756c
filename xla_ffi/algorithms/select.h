// Which schedule serves a call: a pure function of what all ranks know, so that all choose alike.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xla_ffi/algorithms/registry.h"
#include "xla_ffi/core/fifo.h"

namespace jaxring {

// Up to this size the payload travels with the announcement and every rank sums all of them: one
// hop, and no order between calls has to be agreed.
constexpr int64_t kOneShotBytes = 16 << 10;

// Large enough to amortise a hop, small enough that two fit a FIFO and hops overlap.
constexpr int64_t kDefaultChunkBytes = 256 << 10;
constexpr int64_t kMaxChunkBytes = kFifoSlotBytes * kFifoSlotCount / 2;

struct Selection {
  Algorithm algorithm;
  bool one_shot;
  int64_t chunk_elements;
};

// `wire_bytes` is the size of one element of a partial result; `chunk_bytes` 0 means by size.
inline Selection select(Algorithm requested, int64_t count, int64_t element_bytes,
                        int64_t wire_bytes, int64_t chunk_bytes) {
  // Within a host direct is best at every size (docs/performance.md); between hosts it will not be.
  const Algorithm algorithm = requested == Algorithm::kAuto ? Algorithm::kDirect : requested;
  const int64_t bounded =
      std::clamp(chunk_bytes > 0 ? chunk_bytes : kDefaultChunkBytes, wire_bytes, kMaxChunkBytes);
  return Selection{algorithm,
                   algorithm == Algorithm::kDirect && count * element_bytes <= kOneShotBytes,
                   bounded / wire_bytes};
}

}  // namespace jaxring
