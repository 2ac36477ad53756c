// The ends of FIFOs by (from, to, channel), made when first asked for. Asking is part of every
// slice, so it takes no lock.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "xla_ffi/core/fifo.h"

namespace jaxring {

inline int64_t fifo_index(int from_rank, int to_rank, int channel, int rank_count) {
  return (int64_t{channel} * rank_count + from_rank) * rank_count + to_rank;
}

template <class End>
class EndTable {
 public:
  explicit EndTable(int rank_count)
      : rank_count_(rank_count), ends_(int64_t{rank_count} * rank_count * kMaxChannels) {}
  ~EndTable() { clear(); }

  // make() gives a unique_ptr to the end that is missing.
  template <class Make>
  End& get(int from_rank, int to_rank, int channel, Make&& make) {
    std::atomic<End*>& end = ends_[fifo_index(from_rank, to_rank, channel, rank_count_)];
    if (End* known = end.load(std::memory_order_acquire)) return *known;
    std::lock_guard<std::mutex> lock(mutex_);
    if (End* known = end.load(std::memory_order_acquire)) return *known;
    End* made = make().release();
    end.store(made, std::memory_order_release);
    return *made;
  }

  // Nobody may be using an end.
  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (std::atomic<End*>& end : ends_) delete end.exchange(nullptr);
  }

 private:
  const int rank_count_;
  std::mutex mutex_;
  std::vector<std::atomic<End*>> ends_;
};

}  // namespace jaxring
