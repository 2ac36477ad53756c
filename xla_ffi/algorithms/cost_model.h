// What a collective costs by each algorithm: hops that follow one another, messages that the
// busiest rank handles, and bytes that it sends. With measured constants this is the choice behind
// "auto".
#pragma once

#include <cstdint>

#include "xla_ffi/algorithms/registry.h"

namespace jaxring {

// Of one link, in microseconds. Those of a host are measured (docs/performance.md): a hop between
// processes that may have to be woken, the handling of one message, a byte through a FIFO.
struct LinkCosts {
  double hop_us;
  double message_us;
  double byte_us;
};
inline constexpr LinkCosts kSharedMemoryCosts{4.0, 0.3, 1e-4};
// Between hosts, over TCP.
inline constexpr LinkCosts kNetworkCosts{25.0, 5.0, 4e-4};

// Of one operation, for the busiest rank.
struct Expense {
  double hops = 0;
  double messages = 0;
  double sent_bytes = 0;

  double us(const LinkCosts& link) const {
    return hops * link.hop_us + messages * link.message_us + sent_bytes * link.byte_us;
  }
};

namespace cost_model {

constexpr int floor_log2(int value) { return value <= 1 ? 0 : 1 + floor_log2(value / 2); }
constexpr int ceil_log2(int value) { return value <= 1 ? 0 : 1 + floor_log2(value - 1); }

inline Expense allreduce(Algorithm algorithm, double p, double bytes) {
  const int world_size = static_cast<int>(p);
  const double each = bytes / p, last = p - 1;
  switch (algorithm) {
    case Algorithm::kRing:
      return {2 * last, 2 * last, 2 * last * each};
    case Algorithm::kTree:  // two trees for half of the bytes each; an inner node has three
                            // neighbours
      return {2.0 * ceil_log2(world_size), 6, 2 * bytes};
    case Algorithm::kHalvingDoubling: {
      const int corners = 1 << floor_log2(world_size);
      const double shared = corners < world_size;  // one exchange more with whom a corner is shared
      const double steps = 2.0 * floor_log2(world_size);
      return {steps + 2 * shared, steps + 2 * shared,
              2 * (corners - 1) * bytes / corners + shared * bytes};
    }
    case Algorithm::kChain:
      return {2 * last, 4, 2 * bytes};
    case Algorithm::kReducer:
      return {2, 2 * last, last * bytes};
    case Algorithm::kHierarchical:  // of one host, where it is direct
    default:
      if (world_size == 2) return {1, 1, bytes};  // direct: an exchange
      return {2, 2 * last, 2 * last * each};
  }
}

}  // namespace cost_model

// `bytes` is the whole message: of all ranks' blocks, where each has its own.
inline Expense expense_of(Algorithm algorithm, Collective collective, int world_size,
                          double bytes) {
  const double p = world_size, last = p - 1;
  switch (collective) {
    case Collective::kAllreduce:
      return cost_model::allreduce(algorithm, p, bytes);
    case Collective::kReduceScatter:
    case Collective::kAllGather:
      return {algorithm == Algorithm::kRing ? last : 1, last, last * bytes / p};
    case Collective::kBroadcast:
    case Collective::kReduce:
      if (algorithm == Algorithm::kTree) {
        return {1.0 * cost_model::ceil_log2(world_size), 3, 2 * bytes};
      }
      return {1, last, last * bytes};
    default:
      return {1, last, last * bytes / p};
  }
}

// The cheapest of those that serve the call, where all links are alike: none of several levels.
// Only what all ranks know goes in, so all choose alike.
inline Algorithm cheapest(Collective collective, bool in_rank_order, int world_size, double bytes,
                          const LinkCosts& link) {
  Algorithm best = Algorithm::kDirect;
  double best_us = expense_of(best, collective, world_size, bytes).us(link);
  for (const AlgorithmInfo& info : kAlgorithms) {
    if (info.algorithm == Algorithm::kAuto || info.algorithm == Algorithm::kHierarchical ||
        !serves(info.algorithm, collective)) {
      continue;
    }
    if (in_rank_order && !info.rank_order) continue;
    const double us = expense_of(info.algorithm, collective, world_size, bytes).us(link);
    if (us < best_us) {
      best = info.algorithm;
      best_us = us;
    }
  }
  return best;
}

}  // namespace jaxring
