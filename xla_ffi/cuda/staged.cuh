// The direct algorithm through staging buffers that all ranks can read: a rank copies its operand
// to its own arena, raises a flag at each peer, waits for theirs, and reads what it needs, in rank
// order. An operand itself may lie anywhere, so only the arena is ever mapped by others.
//
//   one-shot:  stage, arrive, wait, read                   any collective
//   two-shot:  stage, arrive, wait, sum own piece,         allreduce
//              arrive, wait, read the others' sums
//
// One flag per peer and block counts arrivals. Buffers alternate between two, chunk by chunk, so
// that a rank may fill one while its peers still read the other:
//
//   operands k + 2 are written after the wait for the flags of operands k + 1, which each peer
//   raises when it has read operands k; sums k + 2 after the wait for those of operands k + 2,
//   raised when it has read sums k.
#pragma once

#include <cstdint>

#include "xla_ffi/cuda/channel.cuh"
#include "xla_ffi/cuda/fold.cuh"
#include "xla_ffi/cuda/move.cuh"

namespace jaxring::cuda {

template <class Channel>
class Staged {
  using Block = typename Channel::Block;

 public:
  JR_DEVICE explicit Staged(Channel& channel)
      : channel_(channel),
        block_(channel.block),
        own_(channel.arena(channel.rank())),
        arrivals_(channel.state()->arrivals),
        iterations_(channel.state()->iterations) {}

  JR_DEVICE JR_NOINLINE bool one_shot() {
    const bool pieces = operand_in_pieces(channel_.call.plan.collective);
    const int64_t capacity = channel_.call.plan.arena.shape.staged_bytes / kPackBytes;
    const Loops chunks =
        loops_of(channel_.part(), pieces ? capacity / channel_.world_size() : capacity);
    for (int64_t c = 0; c < chunks.loop_count; ++c) {
      const Range chunk = chunks[c];
      const uint64_t parity = mutated(Mutation::kOneShotParity) ? 0 : iterations_ & 1;
      stage(chunk, parity, pieces);
      if (!wait(arrive(), parity, pieces ? chunk.count * kPackBytes * channel_.rank() : 0)) {
        return false;
      }
      consume(channel_.bytes_of(chunk));
      ++iterations_;
    }
    return end();
  }

  JR_DEVICE JR_NOINLINE bool two_shot() {
    const int64_t capacity = channel_.call.plan.arena.shape.staged_bytes / kPackBytes;
    const Loops chunks = loops_of(channel_.part(), capacity);
    stage(chunks[0], operands_parity(), false);
    uint64_t operands_there = arrive();
    for (int64_t c = 0; c < chunks.loop_count; ++c) {
      const Range chunk = chunks[c];
      const Range own_piece = piece_of(chunk, channel_.world_size(), channel_.rank());
      const uint64_t sums_parity = mutated(Mutation::kTwoShotOutParity) ? 0 : iterations_ & 1;
      const int64_t at = (own_piece.offset - chunk.offset) * kPackBytes;
      if (!wait(operands_there, operands_parity(), at)) return false;
      sum(own_piece, own_.sums(block_.index, sums_parity));
      const uint64_t sums_there = arrive();
      ++iterations_;
      if (c + 1 < chunks.loop_count) {  // while the peers sum
        stage(chunks[c + 1], operands_parity(), false);
        operands_there = arrive();
      }
      if (!mutated(Mutation::kTwoShotSecondWait) && !wait(sums_there)) return false;
      gather(chunk, sums_parity);
    }
    return end();
  }

 protected:  // Multimem's too
  JR_DEVICE uint64_t operands_parity() const {
    return mutated(Mutation::kTwoShotInParity) ? 0 : iterations_ & 1;
  }

  // Input -> own arena: the chunk, or the chunk of each peer's piece in a row.
  JR_DEVICE void stage(Range chunk, uint64_t parity, bool pieces) {
    if (!channel_.sends_anything()) return;
    const Range bytes = channel_.bytes_of(chunk);
    char* to = own_.operands(block_.index, parity);
    if (!pieces) return move(block_, channel_.input(0, bytes.offset), to, bytes.count);
    for (int peer = 0; peer < channel_.world_size(); ++peer) {
      if (peer == channel_.rank() && !channel_.reduces()) continue;  // is read from the input
      move(block_, channel_.input(peer, bytes.offset), to + peer * chunk.count * kPackBytes,
           bytes.count);
    }
  }

  // Tells every peer that this block has done what comes before; returns what to wait for.
  JR_DEVICE uint64_t arrive() {
    barrier(block_, Mutation::kArrivalBarrier);
    ++arrivals_;
    for (int peer = block_.thread(); peer < channel_.world_size(); peer += block_.thread_count()) {
      if (peer == channel_.rank()) continue;
      store_release(block_, channel_.arena(peer).flag(block_.index, channel_.rank()), arrivals_,
                    Mutation::kArrivalRelease);
    }
    return arrivals_;
  }

  // Until every peer has arrived `arrivals` times.
  JR_DEVICE bool wait(uint64_t arrivals) {
    bool failed = false;
    for (int peer = block_.thread(); peer < channel_.world_size() && !failed;
         peer += block_.thread_count()) {
      if (peer == channel_.rank() || mutated(Mutation::kArrivalWait)) continue;
      failed = !wait_until(block_, channel_.call, own_.flag(block_.index, peer), arrivals, peer,
                           Mutation::kArrivalAcquire);
    }
    if (mutated(Mutation::kArrivalJoin)) return !failed;
    return !block_.any(failed);
  }

  // The same; then the operands to read are those that the ranks have staged, at byte `at`.
  JR_DEVICE bool wait(uint64_t arrivals, uint64_t parity, int64_t at) {
    for (int peer = block_.thread(); peer < channel_.world_size(); peer += block_.thread_count()) {
      channel_.shared.operands[peer] = channel_.arena(peer).operands(block_.index, parity) + at;
    }
    return wait(arrivals);
  }

  // Staged operands and own input -> output.
  JR_DEVICE void consume(Range bytes) {
    if (!channel_.receives_anything()) {
      return fill(block_, channel_.output(0, bytes.offset), 0, bytes.count);
    }
    if (channel_.reduces()) return fold_to(bytes, nullptr);
    for (int hop = 0; hop < channel_.world_size(); ++hop) {  // not all from the same peer first
      const int from = (channel_.rank() + hop) % channel_.world_size();
      if (!channel_.receives_from(from)) continue;
      move(block_,
           from == channel_.rank() ? channel_.input(from, bytes.offset)
                                   : channel_.shared.operands[from],
           channel_.output(from, bytes.offset), bytes.count);
    }
  }

  JR_DEVICE void sum(Range piece, char* staged) { fold_to(channel_.bytes_of(piece), staged); }

  // All ranks' operands, in rank order -> output and, unless null, `staged`.
  JR_DEVICE void fold_to(Range bytes, char* staged) {
    const Plan& plan = channel_.call.plan;
    char* destinations[2] = {channel_.output(0, bytes.offset), staged};
    const Fold fold{channel_.shared.operands,
                    destinations,
                    channel_.world_size(),
                    staged == nullptr ? 1 : 2,
                    0,
                    false,
                    plan.op,
                    plan.divisor};
    Channel::Types::fold(block_, plan, fold, bytes.count);
  }

  // The others' sums -> output.
  JR_DEVICE void gather(Range chunk, uint64_t parity) {
    for (int hop = 1; hop < channel_.world_size(); ++hop) {
      const int from = (channel_.rank() + hop) % channel_.world_size();
      const Range bytes = channel_.bytes_of(piece_of(chunk, channel_.world_size(), from));
      move(block_, channel_.arena(from).sums(block_.index, parity),
           channel_.output(0, bytes.offset), bytes.count);
    }
  }

  // The epochs outlive the kernel. All threads had read them before they arrived anywhere.
  JR_DEVICE bool end() {
    if (block_.thread() == 0) {
      channel_.state()->arrivals = arrivals_;
      channel_.state()->iterations = iterations_;
    }
    return true;
  }

  Channel& channel_;
  Block& block_;
  const Arena own_;
  uint64_t arrivals_;
  uint64_t iterations_;
};

}  // namespace jaxring::cuda
