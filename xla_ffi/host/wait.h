// How a thread waits: a few pauses, some yields, then it must sleep on something.
#pragma once

#include <sched.h>

#include <mutex>

namespace jaxring {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Holds the mutex, which others hold for some hundred nanoseconds at most: sleeping over it at
// once, as std::mutex does, and being woken would take 8 us.
inline std::unique_lock<std::mutex> spin_locked(std::mutex& mutex) {
  constexpr int kSpins = 200;
  std::unique_lock<std::mutex> lock(mutex, std::try_to_lock);
  for (int i = 0; i < kSpins && !lock.owns_lock(); ++i) {
    cpu_pause();
    lock.try_lock();
  }
  if (!lock.owns_lock()) lock.lock();
  return lock;
}

// More pauses are no faster with a core per rank and collapse when ranks outnumber cores (facts
// measured at 4 ranks on 2 cores: 4.4 us against 100 us with 2000 pauses; docs/performance.md).
class Backoff {
 public:
  // One pause; false when it is time to sleep.
  bool pause() {
    if (count_ >= kPauses + kYields) return false;
    if (count_++ < kPauses) {
      cpu_pause();
    } else {
      sched_yield();
    }
    return true;
  }
  void reset() { count_ = 0; }

 private:
  static constexpr int kPauses = 50;
  static constexpr int kYields = 64;
  int count_ = 0;
};

}  // namespace jaxring
