// The device's Prims: a thread block runs a schedule's verbs over FIFOs in the arenas. The block is
// a template argument, CudaBlock on a GPU and host threads in tests/cpp, so that the protocol runs
// under ThreadSanitizer, which sees races whose results happen to be right.
//
// Unlike the host, which records steps and never blocks inside one, a block has its multiprocessor
// to itself and waits in place; each wait ends by its deadline or by an abort.
//
// A schedule counts in packs of 16 bytes, so that all it cuts is aligned; a piece's last pack may
// be short.
#pragma once

#include <cstdint>

#include "xla_ffi/algorithms/prims.h"
#include "xla_ffi/cuda/channel.cuh"
#include "xla_ffi/cuda/fold.cuh"
#include "xla_ffi/cuda/move.cuh"

// Members that a schedule, which host and device share, calls from code that exists on one side.
#if defined(__CUDACC__)
#define JR_CALLS_EITHER_SIDE _Pragma("nv_exec_check_disable")
#else
#define JR_CALLS_EITHER_SIDE
#endif

namespace jaxring::cuda {

template <class Channel>
class BlockPrims : public Verbs<BlockPrims<Channel>> {
  using Block = typename Channel::Block;

 public:
  JR_DEVICE explicit BlockPrims(Channel& channel)
      : channel_(channel), block_(channel.block), own_(channel.arena(channel.rank())) {}

  // Every thread of the block calls it, as it does each verb. One copy serves all verbs.
  JR_CALLS_EITHER_SIDE
  JR_HOST_DEVICE JR_NOINLINE void step(Peers from, Peers to, Range range, Own own, Into into) {
    const int64_t slice_packs =
        channel_.call.plan.arena.shape.slot_bytes / (channel_.call.plan.wide_packs * kPackBytes);
    for (int64_t done = 0; done < range.count && !stopped_; done += slice_packs) {
      const int64_t left = range.count - done;
      run_slice(from, to, Range{range.offset + done, left < slice_packs ? left : slice_packs}, own,
                into);
    }
  }

  // A wait has failed: the output is not whole, and the FIFOs hold half an operation.
  JR_DEVICE bool stopped() const { return stopped_; }

 private:
  JR_DEVICE void run_slice(Peers from, Peers to, Range packs, Own own, Into into) {
    const bool failed = !acquire_slots(from, to, own, into, packs);
    // All slots are there, and every thread sees where.
    if (mutated(Mutation::kFifoAcquireBarrier)) {
      stopped_ = failed;
    } else {
      stopped_ = block_.any(failed);
    }
    if (stopped_) return;
    apply(from, to, packs, own, into);
    barrier(block_, Mutation::kFifoReleaseBarrier);  // all threads have read and written
    release_slots(from, to);
  }

  // Each end of a FIFO belongs to one thread of the block, which alone uses its step.
  JR_DEVICE bool owns(int peer, int end) const {
    return (2 * peer + end) % block_.thread_count() == block_.thread();
  }
  JR_DEVICE uint64_t& step_of(int peer, int end) const {
    return *own_.step(block_.index, peer, end);
  }

  // Operands in rank order, own included; destinations with the rank's own first.
  JR_DEVICE bool acquire_slots(Peers from, Peers to, Own own, Into into, Range packs) {
    const char* own_operand = own_source(own, packs);
    if (own_operand != nullptr && block_.thread() == 0) {
      channel_.shared.operands[operands_before_own(from)] = own_operand;
    }
    bool there = true;
    for (int i = 0; i < from.count(); ++i) {
      if (!owns(from[i], 0)) continue;
      const uint64_t step = step_of(from[i], 0);
      there = there && wait_until(block_, channel_.call, own_.produced(block_.index, from[i]),
                                  step + 1, from[i], Mutation::kFifoProducedAcquire);
      const bool after_own = own_operand != nullptr && from[i] > channel_.rank();
      channel_.shared.operands[i + (after_own ? 1 : 0)] = own_.slot(block_.index, from[i], step);
    }
    char* own_result = own_destination(into, packs);
    if (own_result != nullptr && block_.thread() == 0) {
      channel_.shared.destinations[0] = own_result;
    }
    const uint64_t room = channel_.call.plan.arena.shape.slot_count + mutated(Mutation::kFifoRoom);
    for (int i = 0; i < to.count(); ++i) {
      if (!owns(to[i], 1)) continue;
      const uint64_t step = step_of(to[i], 1);
      const uint64_t freed = step < room ? 0 : step - room + 1;
      there = there && wait_until(block_, channel_.call, own_.consumed(block_.index, to[i]), freed,
                                  to[i], Mutation::kFifoConsumedAcquire);
      channel_.shared.destinations[i + (own_result != nullptr ? 1 : 0)] =
          channel_.arena(to[i]).slot(block_.index, channel_.rank(), step);
    }
    return there;
  }

  JR_DEVICE void release_slots(Peers from, Peers to) {
    for (int i = 0; i < to.count(); ++i) {
      if (!owns(to[i], 1)) continue;
      const uint64_t produced = ++step_of(to[i], 1);
      store_release(block_, channel_.arena(to[i]).produced(block_.index, channel_.rank()), produced,
                    Mutation::kFifoProducedRelease);
    }
    for (int i = 0; i < from.count(); ++i) {
      if (!owns(from[i], 0)) continue;
      const uint64_t consumed = ++step_of(from[i], 0);
      store_release(block_, channel_.arena(from[i]).consumed(block_.index, channel_.rank()),
                    consumed, Mutation::kFifoConsumedRelease);
    }
  }

  // The generic step for one slice: operands -> output or kept, and peers.
  JR_DEVICE void apply(Peers from, Peers to, Range packs, Own own, Into into) {
    const Range bytes = bytes_of(packs);
    const bool own_operand = own != Own::kNothing;
    const int operand_count = from.count() + (own_operand ? 1 : 0);
    const bool own_result = into == Into::kOutput || into == Into::kKept;
    const int destination_count = to.count() + (own_result ? 1 : 0);
    char* const* destinations = channel_.shared.destinations;
    if (operand_count == 0) return fill(block_, destinations[0], 0, bytes.count);
    // What only travels is copied: a conversion there and back could change the bits of a NaN.
    const bool moves = !own_operand || (is_final(into) && from.count() == 0 && own != Own::kKept);
    if (moves) {
      if (from.count() == 0 && destination_count == 1 &&
          channel_.shared.operands[0] == destinations[0]) {
        return;  // in place
      }
      return move(block_, channel_.shared.operands[0], destinations, destination_count,
                  bytes.count);
    }
    uint32_t wide = ~0u;  // what comes from peers is partial
    if (own != Own::kKept) wide &= ~(1u << operands_before_own(from));
    const Plan& plan = channel_.call.plan;
    const Fold fold{channel_.shared.operands, destinations, operand_count, destination_count, wide,
                    !is_final(into),          plan.op,      plan.divisor};
    Channel::Types::fold(block_, plan, fold, bytes.count);
  }

  JR_DEVICE int operands_before_own(Peers from) const {
    int before = 0;
    while (before < from.count() && from[before] < channel_.rank()) ++before;
    return before;
  }

  JR_DEVICE const char* own_source(Own own, Range packs) const {
    switch (own) {
      case Own::kInput:
      case Own::kInputs:  // of the direct schedules, which the device has in other forms
        return channel_.input(piece_of_pack(packs.offset), bytes_of(packs).offset);
      case Own::kOutput:
        return channel_.output(piece_of_pack(packs.offset), bytes_of(packs).offset);
      case Own::kKept:
        return kept(packs);
      case Own::kNothing:
        break;
    }
    return nullptr;
  }
  JR_DEVICE char* own_destination(Into into, Range packs) const {
    if (into == Into::kOutput) {
      return channel_.output(piece_of_pack(packs.offset), bytes_of(packs).offset);
    }
    return into == Into::kKept ? kept(packs) : nullptr;
  }
  JR_DEVICE char* kept(Range packs) const {
    const int64_t at = packs.offset - this->window().offset;
    return own_.kept(block_.index) + at * channel_.call.plan.wide_packs * kPackBytes;
  }

  // The schedule's message is this block's parts of all pieces, one after the other.
  JR_DEVICE int piece_of_pack(int64_t pack) const {
    const int64_t packs = channel_.part().count;
    return packs == 0 ? 0 : static_cast<int>(pack / packs);
  }
  JR_DEVICE Range bytes_of(Range packs) const {
    const Range part = channel_.part();
    const int64_t within = packs.offset - piece_of_pack(packs.offset) * part.count;
    return channel_.bytes_of(Range{part.offset + within, packs.count});
  }

  Channel& channel_;
  Block& block_;
  const Arena own_;
  bool stopped_ = false;
};

// One kernel serves what reduces and another what only moves.
template <class Types>
struct DeviceSchedules {
  static constexpr bool reducing = Types::reduces, moving = !Types::reduces, direct = false;
  static constexpr bool levels = false;
};

// Runs the plan's schedule; false if a wait failed.
template <class Channel>
JR_DEVICE JR_NOINLINE bool run_schedule(Channel& channel) {
  const Plan& plan = channel.call.plan;
  const bool pieces = operand_in_pieces(plan.collective) || result_in_pieces(plan.collective);
  const int64_t chunk_packs = chunk_bytes_of(plan.arena.shape) / (plan.wide_packs * kPackBytes);
  const World world{channel.rank(), channel.world_size(), chunk_packs};
  const Work work{plan.collective,
                  Range{0, channel.part().count * (pieces ? channel.world_size() : 1)}, plan.root,
                  channel.call.destination, channel.call.source};
  BlockPrims<Channel> prims(channel);
  jaxring::run_schedule<DeviceSchedules<typename Channel::Types>>(plan.algorithm, channel.channel(),
                                                                  prims, world, work);
  return !prims.stopped();
}

}  // namespace jaxring::cuda
