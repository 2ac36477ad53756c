// How a thread waits: a few pauses, some yields, then it must sleep on something.
#pragma once

#include <sched.h>

#include <chrono>
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

// A few pauses, then yields: more pauses are no faster with a core per rank and collapse when ranks
// outnumber cores (measured at 4 ranks on 2 cores: 4.4 us against 100 us with 2000 pauses). The
// yields go on for as long as `spin` allows and nobody else wants the core, since a thread that
// sleeps takes 30 to 50 us to wake, by which time its peers may sleep in their turn.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Backoff(Clock::duration spin = {}) : spin_(spin) {}

  // One pause; false when it is time to sleep.
  bool pause() {
    if (count_ < kPauses) {
      ++count_;
      cpu_pause();
      return true;
    }
    const Clock::time_point before = Clock::now();
    if (count_ == kPauses) begun_ = before;
    if (count_ >= kPauses + kYields && (shared_ || before - begun_ >= spin_)) return false;
    ++count_;
    sched_yield();
    shared_ = shared_ || Clock::now() - before > kSomebodyRan;
    return true;
  }
  void reset() {
    count_ = 0;
    shared_ = false;
  }

 private:
  static constexpr int kPauses = 50;
  static constexpr int kYields = 64;
  static constexpr auto kSomebodyRan = std::chrono::microseconds(4);
  Clock::duration spin_;
  Clock::time_point begun_;
  int count_ = 0;
  bool shared_ = false;
};

}  // namespace jaxring
