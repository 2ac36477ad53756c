// Settings that count at run time; Python's jaxring.config writes them.
#pragma once

#include <atomic>
#include <chrono>

namespace jaxring {

struct RunTimeSettings {
  std::atomic<double> timeout_s{300.0};  // every wait's deadline
  std::atomic<double> warn_s{30.0};      // after this, say who is missing

  std::chrono::microseconds timeout() const {
    return std::chrono::microseconds(static_cast<int64_t>(timeout_s.load() * 1e6));
  }
};

inline RunTimeSettings& settings() {
  static RunTimeSettings instance;
  return instance;
}

}  // namespace jaxring
