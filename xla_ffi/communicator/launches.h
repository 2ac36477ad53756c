// Turns XLA's RunIds, which mean nothing in another process, into launch ordinals, which do.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

namespace jaxring {

class Launches {
 public:
  // The ordinal of the launch with this RunId: how many other launches were seen before it.
  uint32_t ordinal_of(uint64_t run_id) {
    for (auto it = recent_.rbegin(); it != recent_.rend(); ++it) {
      if (it->first == run_id) return it->second;
    }
    recent_.emplace_back(run_id, next_);
    if (recent_.size() > kRemembered) recent_.pop_front();
    return next_++;
  }

 private:
  // A device runs ahead of another by at most the launches that need no answer from it; on one
  // communicator that is one. More are kept since forgetting too early would split a launch in two.
  static constexpr size_t kRemembered = 64;
  std::deque<std::pair<uint64_t, uint32_t>> recent_;
  uint32_t next_ = 0;
};

}  // namespace jaxring
