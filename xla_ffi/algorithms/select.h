// Which schedule serves a call: a pure function of what all ranks know, so that all choose alike.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xla_ffi/algorithms/cost_model.h"
#include "xla_ffi/algorithms/registry.h"
#include "xla_ffi/core/fifo.h"

namespace jaxring {

// Up to this size the payload travels with the announcement and every rank sums all of them: one
// hop, and no order between calls has to be agreed.
constexpr int64_t kOneShotBytes = 16 << 10;

// Large enough to amortise a hop, small enough that two fit a FIFO and hops overlap.
constexpr int64_t kDefaultChunkBytes = 256 << 10;
constexpr int64_t kMaxChunkBytes = kFifoSlotBytes * kFifoSlotCount / 4;

struct Selection {
  Algorithm algorithm;
  bool one_shot;
  int64_t chunk_elements;
};

// What select() looks at; all ranks know the same.
struct Criteria {
  Collective collective;
  Algorithm requested;
  bool deterministic;
  int process_count;
  int64_t count;                      // elements of one rank's operand
  int64_t element_bytes;              // of the tensor
  int64_t wire_bytes;                 // of one element of a partial result
  int64_t chunk_bytes;                // 0: by size
  const HostLayout* hosts = nullptr;  // null: all ranks are on one host
};

inline Algorithm select_algorithm(const Criteria& call) {
  if (call.requested != Algorithm::kAuto && serves(call.requested, call.collective)) {
    return call.requested;
  }
  const int64_t bytes = call.count * call.element_bytes;
  // Within a process buffers are read in place, and small messages travel with announcements.
  if (call.process_count == 1 || bytes <= kOneShotBytes) return Algorithm::kDirect;
  const bool in_rank_order = call.deterministic && reduces(call.collective);
  const bool several_hosts = call.hosts != nullptr && call.hosts->host_count() > 1;
  if (several_hosts && call.hosts->shares_hosts() && !in_rank_order &&
      serves(Algorithm::kHierarchical, call.collective)) {
    return Algorithm::kHierarchical;
  }
  return cheapest(call.collective, in_rank_order, call.process_count, static_cast<double>(bytes),
                  several_hosts ? kNetworkCosts : kSharedMemoryCosts);
}

inline Selection select(const Criteria& call) {
  const Algorithm algorithm = select_algorithm(call);
  const int64_t bounded = std::clamp(call.chunk_bytes > 0 ? call.chunk_bytes : kDefaultChunkBytes,
                                     call.wire_bytes, kMaxChunkBytes);
  return Selection{
      algorithm,
      algorithm == Algorithm::kDirect && call.count * call.element_bytes <= kOneShotBytes,
      bounded / call.wire_bytes};
}

}  // namespace jaxring
