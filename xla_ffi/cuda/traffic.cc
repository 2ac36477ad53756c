// What crosses a rank's links for a call: from its plan, not measured.
#include <cstdint>

#include "xla_ffi/algorithms/counting.h"
#include "xla_ffi/cuda/plan.h"

namespace jaxring::cuda {
namespace {

// Of one of the ways without FIFOs. A peer that reads what a rank has staged counts as sent to.
Traffic direct_traffic(const KernelCall& call, const Plan& plan, int rank) {
  Traffic traffic{plan.road == Road::kMultimem ? "multimem" : "direct"};
  const int64_t peers = plan.world_size - 1;
  const bool rooted = rank == plan.root;
  int64_t to = peers, from = peers;  // of how many peers a piece goes to, and comes from
  if (plan.collective == Collective::kBroadcast) {
    to = rooted ? peers : 0;
    from = rooted ? 0 : 1;
  } else if (plan.collective == Collective::kReduce) {
    to = rooted ? 0 : 1;
    from = rooted ? peers : 0;
  } else if (plan.collective == Collective::kPermute) {
    to = call.destinations[rank] >= 0 && call.destinations[rank] != rank;
    from = 0;
    for (int peer = 0; peer < plan.world_size; ++peer) {
      from += peer != rank && call.destinations[peer] == rank;
    }
  }
  traffic.bytes_sent = to * plan.piece_bytes;
  traffic.bytes_received = from * plan.piece_bytes;
  if (plan.road == Road::kTwoShot) {
    traffic.bytes_sent = traffic.bytes_received = 2 * peers * plan.piece_bytes / plan.world_size;
  } else if (plan.road == Road::kMultimem) {
    // Each way: a rank's share of the operands to and the sums from the switch, and the others'.
    traffic.bytes_sent = traffic.bytes_received = plan.piece_bytes;
  }
  return traffic;
}

}  // namespace

Traffic traffic_of(const KernelCall& call, int rank, int world_size) {
  const Plan plan = plan_of(call, world_size, kArenaShape);
  if (plan.road != Road::kSchedule) return direct_traffic(call, plan, rank);
  const bool pieces = operand_in_pieces(plan.collective) || result_in_pieces(plan.collective);
  const int64_t elements = plan.piece_bytes / plan.element_bytes * (pieces ? plan.world_size : 1);
  const int64_t accumulator_bytes = int64_t{plan.element_bytes} * plan.wide_packs;
  const World world{rank, plan.world_size, chunk_bytes_of(plan.arena.shape) / accumulator_bytes};
  const Work work{plan.collective, Range{0, elements}, plan.root, -1, -1};
  CountingPrims counts;
  for (int channel = 0; channel < plan.channels; ++channel) {
    run_schedule(plan.algorithm, channel, counts, world, work);
  }
  return {info_of(plan.algorithm).name.data(),
          counts.bytes_sent(accumulator_bytes, plan.element_bytes),
          counts.bytes_received(accumulator_bytes, plan.element_bytes)};
}

}  // namespace jaxring::cuda
