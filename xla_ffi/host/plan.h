// A schedule recorded as steps. Recording instead of running lets one thread drive many ranks, and
// keeps every wait in one place: XLA:CPU gives us too few threads to block in.
#pragma once

#include <cstdint>
#include <vector>

#include "xla_ffi/algorithms/prims.h"

namespace jaxring {

struct Step {
  Peers from;
  Peers to;
  Range range;
  Own own;
  Into into;
  int64_t kept_origin;  // the element that the kept results begin with
};

class PlanPrims : public Verbs<PlanPrims> {
 public:
  void step(Peers from, Peers to, Range range, Own own, Into into) {
    // The peers know the range too, so an empty message is simply not sent.
    if (range.count > 0) steps_.push_back(Step{from, to, range, own, into, window().offset});
  }
  std::vector<Step> take() { return std::move(steps_); }

 private:
  std::vector<Step> steps_;
};

}  // namespace jaxring
