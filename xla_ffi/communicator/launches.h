// Turns XLA's RunIds, which mean nothing in another process, into launch ordinals, which do.
#pragma once

#include <array>
#include <cstdint>

namespace jaxring {

class Launches {
 public:
  // The ordinal of the launch with this RunId: how many other launches were seen before it.
  uint32_t ordinal_of(uint64_t run_id) {
    if (next_ > 0 && recent_[(next_ - 1) % kRemembered] == run_id) return next_ - 1;
    const uint32_t known = next_ < kRemembered ? next_ : kRemembered;
    for (uint32_t back = 1; back <= known; ++back) {
      if (recent_[(next_ - back) % kRemembered] == run_id) return next_ - back;
    }
    recent_[next_ % kRemembered] = run_id;
    return next_++;
  }

 private:
  // A device runs ahead of another by at most the launches that need no answer from it; on one
  // communicator that is one. More are kept since forgetting too early would split a launch in two.
  static constexpr uint32_t kRemembered = 32;
  std::array<uint64_t, kRemembered> recent_{};  // by ordinal
  uint32_t next_ = 0;
};

}  // namespace jaxring
