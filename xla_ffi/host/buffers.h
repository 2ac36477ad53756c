// A message as the host sees it: the leaves of a pytree, one after another, read and written in
// place.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "xla_ffi/core/partition.h"

namespace jaxring {

// Several arrays of one dtype that together are one message of `count()` elements.
template <class Pointer>  // const void* or void*
class Leaves {
 public:
  void add(Pointer data, int64_t count) {
    if (count == 0) return;
    data_.push_back(data);
    ends_.push_back(this->count() + count);
  }

  int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  // Calls f(pointer, piece) for each contiguous piece of `range`; piece.offset counts from
  // range.offset.
  template <class F>
  void for_each_piece(Range range, int64_t element_bytes, F&& f) const {
    size_t leaf = std::upper_bound(ends_.begin(), ends_.end(), range.offset) - ends_.begin();
    for (int64_t done = 0; done < range.count; ++leaf) {
      const int64_t position = range.offset + done;
      const int64_t start = leaf == 0 ? 0 : ends_[leaf - 1];
      const int64_t count = std::min(range.count - done, ends_[leaf] - position);
      f(static_cast<Pointer>(
            static_cast<std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>,
                                           const char*, char*>>(data_[leaf]) +
            (position - start) * element_bytes),
        Range{done, count});
      done += count;
    }
  }

 private:
  std::vector<Pointer> data_;
  std::vector<int64_t> ends_;  // running totals, so that a position finds its leaf by bisection
};

using Input = Leaves<const void*>;
using Output = Leaves<void*>;

}  // namespace jaxring
