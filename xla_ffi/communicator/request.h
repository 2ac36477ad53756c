// What a handler hands to a communicator, and how it learns of the end.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "xla_ffi/algorithms/registry.h"
#include "xla_ffi/core/error.h"
#include "xla_ffi/core/operation.h"
#include "xla_ffi/host/buffers.h"
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
  std::string name;  // the user's, may be empty
  Signature signature{""};

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
  explicit Ticket(Request r) : request(std::move(r)), arrived(Clock::now()) {}

  Request request;
  const Clock::time_point arrived;
  std::atomic<bool> done{false};  // release by the finisher; `error` is readable after an acquire
  std::optional<Error> error;
  Completion on_done;  // set when handed over; guarded by the communicator's mutex
};

}  // namespace jaxring
