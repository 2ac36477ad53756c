// A message as the host sees it: the leaves of a pytree, one after another, read and written in
// place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "xla_ffi/core/partition.h"

namespace jaxring {

// Several arrays of one dtype that together are the elements [origin, origin + count()) of a
// message. One array, the usual case, needs no memory of its own.
template <class Pointer>  // const void* or void*
class Leaves {
 public:
  explicit Leaves(int64_t origin = 0) : origin_(origin) {}

  void add(Pointer data, int64_t count) {
    if (count == 0) return;
    const Leaf leaf{data, this->count() + count};
    if (only_.end == 0) {
      only_ = leaf;
      return;
    }
    if (several_.empty()) several_.push_back(only_);
    several_.push_back(leaf);
  }

  void begin_at(int64_t origin) { origin_ = origin; }

  int64_t count() const { return several_.empty() ? only_.end : several_.back().end; }
  Range range() const { return Range{origin_, count()}; }

  // The array, if there is just one.
  Pointer only() const { return several_.empty() ? only_.data : nullptr; }

  Pointer first() const { return several_.empty() ? only_.data : several_.front().data; }

  // Calls f(pointer, piece) for each contiguous piece of `range`, which lies in range();
  // piece.offset counts from range.offset.
  template <class F>
  void for_each_piece(Range range, int64_t element_bytes, F&& f) const {
    const int64_t first = range.offset - origin_;
    if (several_.empty()) {
      if (range.count > 0) f(at(only_.data, first * element_bytes), Range{0, range.count});
      return;
    }
    auto leaf = std::upper_bound(several_.begin(), several_.end(), first,
                                 [](int64_t value, const Leaf& leaf) { return value < leaf.end; });
    for (int64_t done = 0; done < range.count; ++leaf) {
      const int64_t position = first + done;
      const int64_t start = leaf == several_.begin() ? 0 : (leaf - 1)->end;
      const int64_t count = std::min(range.count - done, leaf->end - position);
      f(at(leaf->data, (position - start) * element_bytes), Range{done, count});
      done += count;
    }
  }

 private:
  struct Leaf {
    Pointer data = nullptr;
    int64_t end = 0;  // a running total, so that a position finds its leaf by bisection
  };

  static Pointer at(Pointer data, int64_t bytes) {
    using Byte =
        std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
    return static_cast<Byte*>(data) + bytes;
  }

  int64_t origin_;
  Leaf only_;
  std::vector<Leaf> several_;  // all of them, where there are more than one
};

using Input = Leaves<const void*>;
using Output = Leaves<void*>;

}  // namespace jaxring
