// Settings that count at run time; Python's jaxring.config writes them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>

namespace jaxring {

struct RunTimeSettings {
  std::atomic<double> timeout_s{300.0};  // every wait's deadline
  std::atomic<double> warn_s{30.0};      // after this, say who is missing
  std::atomic<bool> timeline{false};     // collect operations for it (timeline.h)

  std::chrono::microseconds timeout() const {
    constexpr double kLongest_s = 1e9;  // 31 years; much more would overflow a clock's count
    return std::chrono::microseconds(
        static_cast<int64_t>(std::min(timeout_s.load(), kLongest_s) * 1e6));
  }
};

inline RunTimeSettings& settings() {
  static RunTimeSettings instance;
  return instance;
}

}  // namespace jaxring
