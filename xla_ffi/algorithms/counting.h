// A Prims that moves nothing and counts: the exact hops and elements of a schedule, for any world
// size.
#pragma once

#include "xla_ffi/algorithms/prims.h"

namespace jaxring {

class CountingPrims : public Verbs<CountingPrims> {
 public:
  void step(Peers from, Peers to, Range range, Own own, Into into) {
    if (range.count == 0) return;  // empty chunks are not sent
    (receives_partial(own) ? partial_received_ : final_received_) += from.count() * range.count;
    (is_final(into) ? final_sent_ : partial_sent_) += to.count() * range.count;
    messages_sent_ += to.count();
    messages_received_ += from.count();
  }

  int64_t messages_sent() const { return messages_sent_; }
  int64_t messages_received() const { return messages_received_; }
  // Partial elements travel in the accumulator type, final ones in the tensor's.
  int64_t bytes_sent(int64_t accumulator_bytes, int64_t element_bytes) const {
    return partial_sent_ * accumulator_bytes + final_sent_ * element_bytes;
  }
  int64_t bytes_received(int64_t accumulator_bytes, int64_t element_bytes) const {
    return partial_received_ * accumulator_bytes + final_received_ * element_bytes;
  }

 private:
  int64_t messages_sent_ = 0;
  int64_t messages_received_ = 0;
  int64_t partial_sent_ = 0;
  int64_t partial_received_ = 0;
  int64_t final_sent_ = 0;
  int64_t final_received_ = 0;
};

}  // namespace jaxring
