// The body of every kernel: one block's part of a call.
#pragma once

#include "xla_ffi/cuda/multimem.cuh"
#include "xla_ffi/cuda/packets.cuh"
#include "xla_ffi/cuda/primitives.cuh"
#include "xla_ffi/cuda/staged.cuh"

namespace jaxring::cuda {

// A world of one: the result is the operand, or zero where nobody sends.
template <class Channel>
JR_DEVICE bool run_local(Channel& channel) {
  const Range bytes = channel.bytes_of(channel.part());
  if (channel.receives_anything()) {
    move(channel.block, channel.input(0, bytes.offset), channel.output(0, bytes.offset),
         bytes.count);
  } else {
    fill(channel.block, channel.output(0, bytes.offset), 0, bytes.count);
  }
  return true;
}

template <class Channel>
JR_DEVICE bool run_road(Channel& channel) {
  if constexpr (Channel::Types::by_multimem) {
    return Multimem<Channel>(channel).run();
  } else {
    switch (channel.call.plan.road) {
      case Road::kLocal:
        return run_local(channel);
      case Road::kPackets:
        return run_packets(channel);
      case Road::kOneShot:
        return Staged<Channel>(channel).one_shot();
      case Road::kTwoShot:
        return Staged<Channel>(channel).two_shot();
      case Road::kMultimem:  // has a kernel of its own
        break;
      case Road::kSchedule:
        return run_schedule(channel);
    }
    return true;
  }
}

// NaN into what this block was to write: a half-done sum must not pass for a result.
template <class Channel>
JR_DEVICE void poison(Channel& channel) {
  const Plan& plan = channel.call.plan;
  if (plan.poison_byte < 0 || mutated(Mutation::kPoison)) return;
  const int pieces = result_in_pieces(plan.collective) ? channel.world_size() : 1;
  const Range bytes = channel.bytes_of(channel.channel_part());
  for (int piece = 0; piece < pieces; ++piece) {
    fill(channel.block, channel.output(piece, bytes.offset), plan.poison_byte, bytes.count);
  }
}

// Every thread of the block calls it.
template <class Block, class Types>
JR_DEVICE void run_call(Block& block, BlockShared& shared, const RankCall& call) {
  Channel<Block, Types> channel(block, shared, call);
  const Arena own = channel.arena(channel.rank());
  uint64_t* broken = own.broken();
  const bool keeps_log = block.index == 0 && block.thread() == 0;
  if (keeps_log) {
    ++own.log()->begun;
    own.log()->site = call.site;
  }
  // After a failure flags and FIFOs are out of step; until the arena is zeroed nothing can work.
  // One thread looks, as another block may be about to fail.
  const bool was_broken = block.any(block.thread() == 0 && block.load_acquire(broken) != 0);
  if (!was_broken) {
    if (run_road(channel)) {
      if (keeps_log) {
        ++own.log()->ended;
        ++own.log()->ended_at[call.site];
      }
      return;
    }
    block.barrier();  // what the threads have written lies before what poison() writes
    if (block.thread() == 0) block.store_release(broken, 1);
  }
  poison(channel);
}

}  // namespace jaxring::cuda
