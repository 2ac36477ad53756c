// What a handler hands to a communicator, and how it learns of the end.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/algorithms/registry.h"
#include "xla_ffi/communicator/interrupt.h"
#include "xla_ffi/core/error.h"
#include "xla_ffi/core/operation.h"
#include "xla_ffi/host/buffers.h"
#include "xla_ffi/transport/futex.h"
#include "xla_ffi/transport/transport.h"

namespace jaxring {

using Clock = std::chrono::steady_clock;

// The fixed part of a call: the same for every execution of one HLO instruction.
struct CallInfo {
  Collective collective = Collective::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  Algorithm algorithm = Algorithm::kAuto;
  int64_t chunk_bytes = 0;
  bool deterministic = false;
  int root = 0;                   // of a broadcast or reduce
  std::vector<int> destinations;  // of a ppermute, by rank: where it sends to, or -1
  std::string name;               // the user's, may be empty
  std::string layout;             // what else ranks must agree on, as text; may be empty
  Signature signature{""};

  // Whether others need what the rank has.
  bool is_read(int rank) const {
    if (collective == Collective::kBroadcast) return rank == root;
    if (collective == Collective::kPermute) return destinations[rank] >= 0;
    return true;
  }

  // Of a ppermute: which rank sends to this one, or -1.
  int sender_to(int rank) const {
    const auto found = std::find(destinations.begin(), destinations.end(), rank);
    return found == destinations.end() ? -1 : static_cast<int>(found - destinations.begin());
  }

  // "allreduce 'grads'" for messages
  std::string label() const {
    return std::string(name_of(collective)) + (name.empty() ? "" : " '" + name + "'");
  }
};

struct Request {
  std::shared_ptr<const CallInfo> info;
  int rank = 0;
  uint64_t run_id =
      0;  // XLA's; equal on all devices of a launch in this process, meaningless elsewhere
  uint32_t call = 0;
  uint32_t copy = 0;
  uint32_t iteration = 0;
  Input input;
  Output output;

  // The whole message, of which an input or an output may be one rank's block.
  Range message() const { return Range{0, std::max(input.count(), output.count())}; }
};

// A record about the operation with this key.
inline RecordHeader header_of(const Key& key) {
  RecordHeader header;
  header.launch = key.launch;
  header.call = key.call;
  header.copy = key.copy;
  header.iteration = key.iteration;
  return header;
}

using Completion = std::function<void(std::optional<Error>)>;

// One rank's part in one operation, from arrival to completion.
struct Ticket {
  Ticket(Request r, Clock::time_point arrived_)
      : request(std::move(r)),
        arrived(arrived_),
        interrupts_before(interrupts().load(std::memory_order_relaxed)) {}

  enum State : uint32_t { kWaiting, kSleeping, kDone };

  // acquire: whoever sees it done sees the outputs and `error`
  bool done() const { return state.load(std::memory_order_acquire) == kDone; }

  // The waiter's: false if there is no more to wait for.
  bool fall_asleep() {
    uint32_t expected = kWaiting;
    return state.compare_exchange_strong(expected, kSleeping, std::memory_order_acq_rel);
  }
  void sleep(std::chrono::microseconds at_most) { futex_wait(&state, kSleeping, at_most, true); }
  void awake() {
    uint32_t expected = kSleeping;
    state.compare_exchange_strong(expected, kWaiting, std::memory_order_acq_rel);
  }
  // The finisher's: true if the waiter sleeps and has to be woken.
  bool finish() { return state.exchange(kDone, std::memory_order_acq_rel) == kSleeping; }

  Request request;
  const Clock::time_point arrived;
  const uint32_t interrupts_before;
  std::atomic<uint32_t> state{kWaiting};  // a futex
  std::optional<Error> error;
  Completion on_done;  // set when handed over; guarded by the communicator's mutex
};

}  // namespace jaxring
