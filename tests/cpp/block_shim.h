// A GPU's thread block, played by host threads: the members of CudaBlock (xla_ffi/cuda/ptx.cuh).
#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "xla_ffi/cuda/pack.h"

namespace jaxring::testing {

// NVLink's multicast: an address of `base` is that of the same offset in all windows, by rank.
struct ShimMulticast {
  char* base = nullptr;
  int64_t bytes = 0;
  std::vector<char*> windows;

  int64_t offset_of(const void* address) const { return static_cast<const char*>(address) - base; }
  bool holds(const void* address) const {
    for (const char* window : windows) {
      if (address >= window && address < window + bytes) return true;
    }
    return false;
  }
};

// What the threads of one block share.
class ShimTeam {
 public:
  explicit ShimTeam(int thread_count) : barrier_(thread_count, Decide{this}) {}

  bool any(bool yes) {
    if (yes) said_yes_.store(true, std::memory_order_relaxed);
    barrier_.arrive_and_wait();
    return decision_;  // the next one is made when all, this thread too, have come again
  }

 private:
  struct Decide {
    ShimTeam* team;
    void operator()() noexcept {
      team->decision_ = team->said_yes_.exchange(false, std::memory_order_relaxed);
    }
  };

  std::atomic<bool> said_yes_{false};
  bool decision_ = false;
  std::barrier<Decide> barrier_;
};

// One object per thread.
class ShimBlock {
 public:
  const int index;

  ShimBlock(int index_, int thread, int thread_count, ShimTeam& team,
            const ShimMulticast& multicast)
      : index(index_),
        thread_(thread),
        thread_count_(thread_count),
        team_(team),
        multicast_(multicast) {}

  int thread() const { return thread_; }
  int thread_count() const { return thread_count_; }
  void barrier() { any(false); }
  bool any(bool yes) {
    fenced_ = false;
    return team_.any(yes);
  }

  uint64_t load_acquire(const uint64_t* address) const {
    return atomic(address).load(std::memory_order_acquire);
  }
  void store_release(uint64_t* address, uint64_t value) const {
    atomic(address).store(value, std::memory_order_release);
  }
  void store_first(uint64_t* address, uint64_t value) const {
    uint64_t zero = 0;
    atomic(address).compare_exchange_strong(zero, value, std::memory_order_relaxed);
  }
  // Of mutants only.
  uint64_t load_relaxed(const uint64_t* address) const {
    return atomic(address).load(std::memory_order_relaxed);
  }
  void store_relaxed(uint64_t* address, uint64_t value) const {
    atomic(address).store(value, std::memory_order_relaxed);
  }

  void store_packets(cuda::Packets* address, cuda::Packets value) const {
    store_relaxed(&address->high, value.high);  // in any order, as on a GPU
    store_relaxed(&address->low, value.low);
  }
  // The thread looks for packets only after so many milliseconds: its peers are then ahead.
  void delay_packets(int delay_ms) { packets_delay_ms_ = delay_ms; }
  cuda::Packets load_packets(const cuda::Packets* address) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::exchange(packets_delay_ms_, 0)));
    return {load_relaxed(&address->low), load_relaxed(&address->high)};
  }

  cuda::Pack load16(const void* address) const {
    if (multicast_.holds(address)) require_fence();
    cuda::Pack pack;
    std::memcpy(&pack, address, sizeof(pack));
    return pack;
  }
  void store16(void* address, cuda::Pack pack) const { std::memcpy(address, &pack, sizeof(pack)); }

  // Plain accesses, for which the sanitizer wants an order; the ranks are taken from behind.
  template <typename T>
  cuda::Pack load_sum16(const void* multicast) const {
    require_fence();
    const int64_t offset = multicast_.offset_of(multicast);
    AccumulatorOf<T> sums[cuda::kLanes<T>] = {};
    for (size_t rank = multicast_.windows.size(); rank-- > 0;) {
      cuda::Pack pack;
      std::memcpy(&pack, multicast_.windows[rank] + offset, sizeof(pack));
      AccumulatorOf<T> values[cuda::kLanes<T>];
      cuda::unpack<T>(pack, values);
      for (int i = 0; i < cuda::kLanes<T>; ++i) sums[i] += values[i];
    }
    return cuda::packed<T>(sums);
  }
  void store_all16(void* multicast, cuda::Pack pack) const {
    require_fence();
    for (char* window : multicast_.windows) {
      std::memcpy(window + multicast_.offset_of(multicast), &pack, sizeof(pack));
    }
  }
  void proxy_fence() { fenced_ = true; }

  uint64_t now_ns() const { return std::chrono::steady_clock::now().time_since_epoch().count(); }
  void pause() const { std::this_thread::yield(); }

 private:
  static std::atomic_ref<uint64_t> atomic(const uint64_t* address) {
    return std::atomic_ref(*const_cast<uint64_t*>(address));
  }

  // What came by a window's other address is seen only past a fence, taken after the barrier that
  // it came by.
  void require_fence() const {
    if (fenced_) return;
    std::fprintf(stderr, "shim: a window is read without a proxy fence\n");
    std::_Exit(70);
  }

  const int thread_;
  const int thread_count_;
  bool fenced_ = false;
  int packets_delay_ms_ = 0;
  ShimTeam& team_;
  const ShimMulticast& multicast_;
};

}  // namespace jaxring::testing
