// Sleeping on a word of memory until somebody rings.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

namespace jaxring {

// Returns at once unless *word == value. `within_process`: no other process uses the word, which
// makes it cheaper.
inline void futex_wait(std::atomic<uint32_t>* word, uint32_t value,
                       std::chrono::microseconds at_most, bool within_process) {
  const timespec timeout{at_most.count() / 1000000, at_most.count() % 1000000 * 1000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word),
          FUTEX_WAIT | (within_process ? FUTEX_PRIVATE_FLAG : 0), value, &timeout, nullptr, 0);
}

inline void futex_wake_all(std::atomic<uint32_t>* word, bool within_process) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word),
          FUTEX_WAKE | (within_process ? FUTEX_PRIVATE_FLAG : 0), INT_MAX, nullptr, nullptr, 0);
}

}  // namespace jaxring
