// What a schedule is written against. A Prims has the verbs below; three classes have them: the
// host's PlanPrims (records steps), CountingPrims (counts), and the device's BlockPrims (a thread
// block runs them).
//
//   copy(range)                               input -> output
//   zero(range)                               zeros -> output
//   send(to, range, own)                      own -> peers                        (partial)
//   send_final(to, range, own)                own -> peers                        (final)
//   copy_send(to, range)                      input -> output and peers           (final)
//   recv_copy(from, range)                    peer (final) -> output
//   recv_copy_send(from, to, range)           peer (final) -> output and peers    (final)
//   recv_reduce_send(from, to, range, own)    peers (partial) + own -> peers      (partial)
//   recv_reduce_keep(from, range, own)        peers (partial) + own -> kept
//   recv_reduce_copy(from, range, own)        peers (partial) + own -> output     (final)
//   recv_reduce_copy_send(from, to, range)    peers (partial) + input -> output and peers (final)
//   recv_inputs_copy(from, range)             peers' inputs (final) + input -> output
//   recv_inputs_copy_send(from, to, range)    peers' inputs (final) + input -> output and peers
//   (final)
//
// `own` is the input unless said otherwise. A partial message carries the accumulator type, a final
// one the tensor's type; rounding happens once, where a result becomes final. One fold takes its
// operands in rank order, own included.
#pragma once

#include <cstdint>

#include "xla_ffi/core/partition.h"
#include "xla_ffi/core/topology.h"

namespace jaxring {

struct HostLayout;

// One rank's view of the operation it schedules.
struct World {
  int rank;
  int world_size;
  int64_t chunk_elements;  // the most that one verb moves; a FIFO holds at least two such chunks
  const HostLayout* hosts = nullptr;  // who shares a host with whom; null: all do
};

// A rank's own operand of a step.
enum class Own : uint8_t {
  kNothing,
  kInput,
  kInputs,  // the input, and from peers comes theirs: nothing has been added up yet
  kKept,    // partial results that an earlier step has kept
  kOutput,  // final results that an earlier step has written
};

// Where a step's result goes.
enum class Into : uint8_t {
  kPeers,  // as a partial result
  kKept,
  kOutput,      // as a final result; peers, if any, get it too
  kFinalPeers,  // as a final result, but not into the output
};

// What a rank receives in a step is partial where its own operand is added to a sum.
JR_HOST_DEVICE constexpr bool receives_partial(Own own) {
  return own != Own::kNothing && own != Own::kInputs;
}
JR_HOST_DEVICE constexpr bool is_final(Into into) {
  return into == Into::kOutput || into == Into::kFinalPeers;
}

// The verbs over a single generic `step(from, to, range, own, into)` of the derived class.
template <class Derived>
class Verbs {
 public:
  JR_HOST_DEVICE void copy(Range range) {
    step(nobody(), nobody(), range, Own::kInput, Into::kOutput);
  }
  JR_HOST_DEVICE void zero(Range range) {
    step(nobody(), nobody(), range, Own::kNothing, Into::kOutput);
  }
  JR_HOST_DEVICE void send(Peers to, Range range, Own own = Own::kInput) {
    step(nobody(), to, range, own, Into::kPeers);
  }
  JR_HOST_DEVICE void send_final(Peers to, Range range, Own own = Own::kInput) {
    step(nobody(), to, range, own, Into::kFinalPeers);
  }
  JR_HOST_DEVICE void copy_send(Peers to, Range range) {
    step(nobody(), to, range, Own::kInput, Into::kOutput);
  }
  JR_HOST_DEVICE void recv_copy(Peers from, Range range) {
    step(from, nobody(), range, Own::kNothing, Into::kOutput);
  }
  JR_HOST_DEVICE void recv_copy_send(Peers from, Peers to, Range range) {
    step(from, to, range, Own::kNothing, Into::kOutput);
  }
  JR_HOST_DEVICE void recv_reduce_send(Peers from, Peers to, Range range, Own own = Own::kInput) {
    step(from, to, range, own, Into::kPeers);
  }
  JR_HOST_DEVICE void recv_reduce_keep(Peers from, Range range, Own own = Own::kInput) {
    step(from, nobody(), range, own, Into::kKept);
  }
  JR_HOST_DEVICE void recv_reduce_copy(Peers from, Range range, Own own = Own::kInput) {
    step(from, nobody(), range, own, Into::kOutput);
  }
  JR_HOST_DEVICE void recv_reduce_copy_send(Peers from, Peers to, Range range) {
    step(from, to, range, Own::kInput, Into::kOutput);
  }
  JR_HOST_DEVICE void recv_inputs_copy(Peers from, Range range) {
    step(from, nobody(), range, Own::kInputs, Into::kOutput);
  }
  JR_HOST_DEVICE void recv_inputs_copy_send(Peers from, Peers to, Range range) {
    step(from, to, range, Own::kInputs, Into::kOutput);
  }

  // What is kept from here on lies in `window`, at most chunk_elements.
  JR_HOST_DEVICE void keep_within(Range window) { window_ = window; }

 protected:
  JR_HOST_DEVICE Range window() const { return window_; }

 private:
  JR_HOST_DEVICE static Peers nobody() { return Peers::none(); }
  JR_HOST_DEVICE void step(Peers from, Peers to, Range range, Own own, Into into) {
    static_cast<Derived*>(this)->step(from, to, range, own, into);
  }
  Range window_;
};

}  // namespace jaxring
