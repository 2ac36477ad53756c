// The CPU's rounding and denormal mode, which belongs to the thread.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxring {

// Round to nearest and denormals kept, for as long as it lives. XLA flushes denormals to zero on
// the threads it computes on; the progress thread is ours and doesn't. Which of them carries an
// operation is a matter of timing, so without this a result could differ from run to run.
class StandardFloatingPoint {
 public:
  StandardFloatingPoint() : saved_(read()) {
    if (saved_ & kModeBits) write(saved_ & ~kModeBits);
  }
  ~StandardFloatingPoint() {
    if (saved_ & kModeBits) write(saved_);
  }
  StandardFloatingPoint(const StandardFloatingPoint&) = delete;
  StandardFloatingPoint& operator=(const StandardFloatingPoint&) = delete;

 private:
#if defined(__x86_64__)
  using Register = uint32_t;
  static constexpr Register kModeBits = 0x8000 | 0x6000 | 0x0040;  // MXCSR: FZ, RC, DAZ
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = uint64_t;
  static constexpr Register kModeBits = uint64_t{7} << 22;  // FPCR: RMode, FZ
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
#error "jaxring runs on x86-64 and aarch64"
#endif
  Register saved_;
};

}  // namespace jaxring
