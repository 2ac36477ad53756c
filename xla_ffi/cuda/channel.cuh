// What the code of one block works with: its place, its part of the message, and how it waits.
#pragma once

#include <cstdint>

#include "xla_ffi/cuda/arena.h"
#include "xla_ffi/cuda/mutation.h"
#include "xla_ffi/cuda/plan.h"

namespace jaxring::cuda {

// A block's shared memory: the operands and destinations of what it does next. Null where a wait
// has failed.
struct BlockShared {
  const char* operands[kMaxRanks];
  char* destinations[kMaxRanks + 1];
};

// Types is a DTypeList (fold.cuh). Only reductions look at it: all else goes by bytes, so that one
// copy of it serves several dtypes.
template <class BlockType, class TypesOf>
class Channel {
 public:
  using Block = BlockType;
  using Types = TypesOf;

  Block& block;
  BlockShared& shared;
  const RankCall& call;

  JR_DEVICE Channel(Block& block_, BlockShared& shared_, const RankCall& call_)
      : block(block_), shared(shared_), call(call_) {
    const Plan& plan = call.plan;
    const Range packs{0, (plan.piece_bytes + kPackBytes - 1) / kPackBytes};
    part_ = piece_of(packs, plan.parts, block.index / plan.channels);
  }

  JR_DEVICE int rank() const { return call.world.rank; }
  JR_DEVICE int world_size() const { return call.world.world_size; }
  JR_DEVICE int channel() const { return block.index % call.plan.channels; }
  JR_DEVICE Arena arena(int rank) const { return Arena(call.world.arenas[rank], call.plan.arena); }
  JR_DEVICE BlockState* state() const { return arena(rank()).state(block.index); }

  // This block's part of each piece, in packs, and of that what its channel alone writes.
  JR_DEVICE Range part() const { return part_; }
  JR_DEVICE Range channel_part() const { return piece_of(part_, call.plan.channels, channel()); }
  // The bytes of those packs within a piece, whose last pack may be short.
  JR_DEVICE Range bytes_of(Range packs) const {
    const int64_t offset = packs.offset * kPackBytes;
    const int64_t left = call.plan.piece_bytes - offset;
    const int64_t count = packs.count * kPackBytes;
    return Range{offset, count < left ? count : left > 0 ? left : 0};
  }

  // What this rank sends to and receives from a peer in one hop, itself included.
  JR_DEVICE bool sends_to(int peer) const {
    const Plan& plan = call.plan;
    switch (plan.collective) {
      case Collective::kBroadcast:
        return rank() == plan.root;
      case Collective::kReduce:
        return peer == plan.root;
      case Collective::kPermute:
        return peer == call.destination;
      default:
        return true;
    }
  }
  JR_DEVICE bool receives_from(int peer) const {
    const Plan& plan = call.plan;
    switch (plan.collective) {
      case Collective::kBroadcast:
        return peer == plan.root;
      case Collective::kReduce:
        return rank() == plan.root;
      case Collective::kPermute:
        return peer == call.source;
      default:
        return true;
    }
  }
  JR_DEVICE bool sends_anything() const {
    return call.plan.collective == Collective::kPermute     ? call.destination >= 0
           : call.plan.collective == Collective::kBroadcast ? rank() == call.plan.root
                                                            : true;
  }
  JR_DEVICE bool receives_anything() const {
    return call.plan.collective == Collective::kPermute  ? call.source >= 0
           : call.plan.collective == Collective::kReduce ? rank() == call.plan.root
                                                         : true;
  }
  JR_DEVICE bool reduces() const {
    if constexpr (!Types::reduces) return false;
    const Collective collective = call.plan.collective;
    return collective == Collective::kAllreduce || collective == Collective::kReduceScatter ||
           collective == Collective::kReduce;
  }

  // Byte `offset` of the piece that goes to or comes from a peer.
  JR_DEVICE const char* input(int to, int64_t offset) const {
    const int64_t piece = operand_in_pieces(call.plan.collective) ? to : 0;
    return static_cast<const char*>(call.input) + piece * call.plan.piece_bytes + offset;
  }
  JR_DEVICE char* output(int from, int64_t offset) const {
    const int64_t piece = result_in_pieces(call.plan.collective) ? from : 0;
    return static_cast<char*>(call.output) + piece * call.plan.piece_bytes + offset;
  }

 private:
  Range part_;
};

// The end of a wait without success. The clock and the abort word, which is far away, are looked at
// once in a while.
template <class Block>
class Deadline {
 public:
  JR_DEVICE Deadline(Block& block, const RankCall& call) : block_(block), call_(call) {}

  // To be asked after each poll in vain. True: give up; the status word says for whom we waited.
  JR_DEVICE bool passed(int peer) {
    constexpr int kPollsPerCheck = 256;
    block_.pause();
    if (++polls_ % kPollsPerCheck != 0) return false;
    const DeviceWorld& world = call_.world;
    const uint64_t now_ns = block_.now_ns();
    if (start_ns_ == 0) start_ns_ = now_ns;  // the first look, and not before: most waits are short
    const bool aborted = !mutated(Mutation::kAbortWord) && block_.load_acquire(world.abort) != 0;
    const bool slow = world.warn_ns != 0 && now_ns - start_ns_ > world.warn_ns;
    if (slow && !told_ && !mutated(Mutation::kStallWord)) {
      told_ = true;
      block_.store_release(world.stalled, wait_status(call_.site, peer));
    }
    if (!aborted && now_ns - start_ns_ <= world.timeout_ns) return false;
    // The first to give up is nearest to the cause; those that wait for it follow.
    const uint64_t status = wait_status(call_.site, peer);
    if (mutated(Mutation::kFirstWriter)) {
      block_.store_release(world.status, status);
    } else {
      block_.store_first(world.status, status);
    }
    return true;
  }

 private:
  Block& block_;
  const RankCall& call_;
  uint64_t start_ns_ = 0;
  int polls_ = 0;
  bool told_ = false;
};

// Until *counter reaches `target`; false if it never does.
template <class Block>
JR_DEVICE bool wait_until(Block& block, const RankCall& call, const uint64_t* counter,
                          uint64_t target, int peer, Mutation acquire) {
  Deadline<Block> deadline(block, call);
  while (load_acquire(block, counter, acquire) < target) {
    if (deadline.passed(peer)) return false;
  }
  return true;
}

}  // namespace jaxring::cuda
