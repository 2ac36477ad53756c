// How a thread waits: a few pauses, some yields, then it must sleep on something.
#pragma once

#include <sched.h>

namespace jaxring {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
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
