// A GPU's thread block, played by a few host threads, and the raw memory of a world of such blocks.
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <deque>
#include <thread>
#include <vector>

#include "xla_ffi/algorithms/registry.h"
#include "xla_ffi/cuda/primitives.cuh"

namespace jaxring::testing {

// The members of CudaBlock (xla_ffi/cuda/ptx.cuh), one object per thread.
class ShimBlock {
 public:
  ShimBlock(int thread, int thread_count, std::barrier<>& barrier)
      : thread_(thread), thread_count_(thread_count), barrier_(barrier) {}

  int thread() const { return thread_; }
  int thread_count() const { return thread_count_; }
  void barrier() { barrier_.arrive_and_wait(); }
  uint64_t load_acquire(const uint64_t* address) const {
    return std::atomic_ref(*const_cast<uint64_t*>(address)).load(std::memory_order_acquire);
  }
  void store_release(uint64_t* address, uint64_t value) const {
    std::atomic_ref(*address).store(value, std::memory_order_release);
  }
  uint64_t now_ns() const { return std::chrono::steady_clock::now().time_since_epoch().count(); }
  void pause() const { std::this_thread::yield(); }

 private:
  const int thread_;
  const int thread_count_;
  std::barrier<>& barrier_;
};

// FIFOs between all ranks on all channels, as a GPU's memory would hold them. They last over
// launches.
class ShimWorld {
 public:
  static constexpr int kThreadsPerBlock = 3;
  static constexpr FifoShape kShape{256, 4};
  static constexpr int64_t kChunkSlots =
      2;  // a FIFO holds two chunks, the least that schedules allow

  explicit ShimWorld(int world_size)
      : world_size_(world_size), ends_from_(pairs()), ends_to_(pairs()), slots_(pairs()) {
    for (size_t i = 0; i < pairs(); ++i) {
      slots_[i].resize(kShape.slot_bytes * kShape.slot_count / sizeof(uint64_t));
      counters_.emplace_back();
    }
    for (int channel = 0; channel < kMaxChannels; ++channel) {
      for (int a = 0; a < world_size; ++a) {
        for (int b = 0; b < world_size; ++b) {
          const size_t fifo = index(channel, a, b);  // from a to b
          const FifoEnd end{&counters_[fifo].produced, &counters_[fifo].consumed,
                            reinterpret_cast<char*>(slots_[fifo].data()), 0};
          ends_to_[fifo] = end;
          ends_from_[index(channel, b, a)] = end;
        }
      }
    }
  }

  uint64_t abort = 0;
  uint64_t status = 0;
  uint64_t timeout_ns = 60'000'000'000;

  // Runs the schedule with one block per rank and channel, but for `absent` (-1: all are there).
  // Returns how many blocks stopped before the end.
  template <typename T, class Functor>
  int allreduce(Algorithm algorithm, const std::vector<std::vector<T>>& inputs,
                std::vector<std::vector<T>>& outputs, int absent = -1) {
    std::vector<std::thread> threads;
    std::deque<std::barrier<>> barriers;
    std::deque<SliceSlots> shared;
    std::atomic<int> stopped{0};
    for (int rank = 0; rank < world_size_; ++rank) {
      for (int channel = 0; rank != absent && channel < channels_of(algorithm); ++channel) {
        std::barrier<>& barrier = barriers.emplace_back(kThreadsPerBlock);
        SliceSlots& slots = shared.emplace_back();
        const BlockWork<T> work{rank,
                                inputs[rank].data(),
                                outputs[rank].data(),
                                &ends_from_[index(channel, rank, 0)],
                                &ends_to_[index(channel, rank, 0)],
                                kShape,
                                {&abort, &status, timeout_ns},
                                world_size_};
        const int64_t slot_elements = kShape.slot_bytes / sizeof(AccumulatorOf<T>);
        const World world{rank, world_size_, kChunkSlots * slot_elements};
        const Range message{0, static_cast<int64_t>(inputs[rank].size())};
        for (int thread = 0; thread < kThreadsPerBlock; ++thread) {
          threads.emplace_back([=, &barrier, &slots, &stopped] {
            ShimBlock block(thread, kThreadsPerBlock, barrier);
            BlockPrims<ShimBlock, T, Functor> prims(block, slots, work);
            run_allreduce(algorithm, channel, prims, world, message);
            if (thread == 0 && prims.stopped()) ++stopped;
          });
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
    return stopped;
  }

 private:
  static constexpr int kMaxChannels = 2;
  struct Counters {
    alignas(JR_CACHE_LINE) uint64_t produced = 0;
    alignas(JR_CACHE_LINE) uint64_t consumed = 0;
  };

  size_t pairs() const { return static_cast<size_t>(kMaxChannels) * world_size_ * world_size_; }
  size_t index(int channel, int self, int peer) const {
    return (static_cast<size_t>(channel) * world_size_ + self) * world_size_ + peer;
  }

  const int world_size_;
  std::vector<FifoEnd> ends_from_;  // [channel][self][peer]
  std::vector<FifoEnd> ends_to_;
  std::vector<std::vector<uint64_t>> slots_;
  std::deque<Counters> counters_;
};

}  // namespace jaxring::testing
