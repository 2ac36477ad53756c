// What a schedule is written against. A Prims has the verbs below; three classes have them: the
// host's PlanPrims (records steps), CountingPrims (counts), and the device's Prims (a thread block
// runs them).
//
//   copy(range)                               own input -> output
//   send(to, range)                           own input -> peers                  (partial)
//   recv_reduce_send(from, to, range)         peers (partial) + own -> peers      (partial)
//   recv_reduce_copy(from, range)             peers (partial) + own -> output     (final)
//   recv_reduce_copy_send(from, to, range)    peers (partial) + own -> output and peers (final)
//   recv_copy(from, range)                    peer (final) -> output
//   recv_copy_send(from, to, range)           peer (final) -> output and peers    (final)
//
// A partial message carries the accumulator type, a final one the tensor's type; rounding happens
// once, where the output is written. One fold takes its operands in rank order, own input included.
#pragma once

#include <cstdint>

#include "xla_ffi/core/partition.h"
#include "xla_ffi/core/topology.h"

namespace jaxring {

// One rank's view of the operation it schedules.
struct World {
  int rank;
  int world_size;
  int64_t chunk_elements;  // the most that one verb moves; a FIFO holds at least two such chunks
};

// The verbs over a single generic `step(from, to, range, use_input, write_output)` of the derived
// class.
template <class Derived>
class Verbs {
 public:
  JR_HOST_DEVICE void copy(Range range) { step(Peers::none(), Peers::none(), range, true, true); }
  JR_HOST_DEVICE void send(Peers to, Range range) { step(Peers::none(), to, range, true, false); }
  JR_HOST_DEVICE void recv_reduce_send(Peers from, Peers to, Range range) {
    step(from, to, range, true, false);
  }
  JR_HOST_DEVICE void recv_reduce_copy(Peers from, Range range) {
    step(from, Peers::none(), range, true, true);
  }
  JR_HOST_DEVICE void recv_reduce_copy_send(Peers from, Peers to, Range range) {
    step(from, to, range, true, true);
  }
  JR_HOST_DEVICE void recv_copy(Peers from, Range range) {
    step(from, Peers::none(), range, false, true);
  }
  JR_HOST_DEVICE void recv_copy_send(Peers from, Peers to, Range range) {
    step(from, to, range, false, true);
  }

 private:
  JR_HOST_DEVICE void step(Peers from, Peers to, Range range, bool use_input, bool write_output) {
    static_cast<Derived*>(this)->step(from, to, range, use_input, write_output);
  }
};

}  // namespace jaxring
