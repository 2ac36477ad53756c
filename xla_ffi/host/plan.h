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
  bool use_input;     // the rank's own input is an operand; what it receives is partial
  bool write_output;  // the result is final: rounded, written to the output, and sent as such
};

class PlanPrims : public Verbs<PlanPrims> {
 public:
  void step(Peers from, Peers to, Range range, bool use_input, bool write_output) {
    // The peers know the range too, so an empty message is simply not sent.
    if (range.count > 0) steps_.push_back(Step{from, to, range, use_input, write_output});
  }
  std::vector<Step> take() { return std::move(steps_); }

 private:
  std::vector<Step> steps_;
};

}  // namespace jaxring
