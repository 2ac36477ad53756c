// Two-shot allreduce with sums made by NVLink's switches (NVLS): ranks stage their operands in
// windows, which one multicast address joins; each rank loads the sums of its piece from there and
// stores them back to all. A rank's links carry the message once each way instead of nearly twice.
//
//   stage, arrive, wait, sum own piece and store it to all, arrive, wait, read own window
//
// The switches sum in an order of their own, so that it never serves deterministic=True. Flags and
// buffers are those of two-shot, with proxy fences where the two addresses of a window meet: after
// each wait, hence on every way from an access to the next one by the other address.
#pragma once

#include <cstdint>

#include "xla_ffi/cuda/staged.cuh"

namespace jaxring::cuda {

template <class Channel>
class Multimem : private Staged<Channel> {
  using Base = Staged<Channel>;

 public:
  JR_DEVICE explicit Multimem(Channel& channel)
      : Base(channel),
        own_window_(channel.call.world.window, channel.call.plan.arena.shape),
        all_windows_(channel.call.world.multicast, channel.call.plan.arena.shape) {}

  JR_DEVICE JR_NOINLINE bool run() {
    const int64_t capacity = this->channel_.call.plan.arena.shape.staged_bytes / kPackBytes;
    const Loops chunks = loops_of(this->channel_.part(), capacity);
    stage(chunks[0]);
    uint64_t operands_there = this->arrive();
    for (int64_t c = 0; c < chunks.loop_count; ++c) {
      const Range chunk = chunks[c];
      const uint64_t parity = mutated(Mutation::kMultimemSumsParity) ? 0 : this->iterations_ & 1;
      if (!this->wait(operands_there)) return false;
      if (!mutated(Mutation::kMultimemFence)) this->block_.proxy_fence();
      sum(chunk, parity);
      const uint64_t sums_there = this->arrive();
      ++this->iterations_;
      if (c + 1 < chunks.loop_count) {  // while the peers sum
        stage(chunks[c + 1]);
        operands_there = this->arrive();
      }
      if (!mutated(Mutation::kMultimemSecondWait) && !this->wait(sums_there)) return false;
      if (!mutated(Mutation::kMultimemSumsFence)) this->block_.proxy_fence();
      const Range bytes = this->channel_.bytes_of(chunk);
      move(this->block_, own_window_.sums(this->block_.index, parity),
           this->channel_.output(0, bytes.offset), bytes.count);
    }
    return this->end();
  }

 private:
  JR_DEVICE uint64_t operands_parity() const {
    return mutated(Mutation::kMultimemParity) ? 0 : this->iterations_ & 1;
  }

  JR_DEVICE void stage(Range chunk) {
    const Range bytes = this->channel_.bytes_of(chunk);
    move(this->block_, this->channel_.input(0, bytes.offset),
         own_window_.operands(this->block_.index, operands_parity()), bytes.count);
  }

  // This rank's piece of the chunk, in whole packs: what the last one holds beyond the message is
  // summed and never read.
  JR_DEVICE void sum(Range chunk, uint64_t parity) {
    const Plan& plan = this->channel_.call.plan;
    const Range piece = piece_of(chunk, this->channel_.world_size(), this->channel_.rank());
    const int64_t at = (piece.offset - chunk.offset) * kPackBytes;
    const char* from = all_windows_.operands(this->block_.index, operands_parity()) + at;
    char* to = all_windows_.sums(this->block_.index, parity) + at;
    Channel::Types::sum_all(this->block_, plan, from, to, piece.count);
  }

  const Window own_window_;
  const Window all_windows_;
};

template <typename T, class Block>
JR_DEVICE JR_NOINLINE void sum_packs(Block& block, const char* from, char* to, int64_t packs,
                                     int64_t divisor) {
  const auto divided = [&](Pack pack) {
    if (divisor == 0) return pack;
    AccumulatorOf<T> values[kLanes<T>];
    unpack<T>(pack, values);
    finish<T, kLanes<T>>(divisor, values);
    return packed<T>(values);
  };
  const int64_t stride = block.thread_count();
  int64_t i = block.thread();
  for (; i + (kInFlight - 1) * stride < packs; i += kInFlight * stride) {
    Pack sums[kInFlight];
    JR_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      sums[k] = block.template load_sum16<T>(from + (i + k * stride) * kPackBytes);
    }
    JR_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      block.store_all16(to + (i + k * stride) * kPackBytes, divided(sums[k]));
    }
  }
  for (; i < packs; i += stride) {
    const Pack sum = block.template load_sum16<T>(from + i * kPackBytes);
    block.store_all16(to + i * kPackBytes, divided(sum));
  }
}

// The dtypes whose sums switches make.
template <typename... Ts>
struct MultimemList : DTypeList<Ts...> {
  static constexpr bool by_multimem = true;

  template <class Block>
  static JR_DEVICE void sum_all(Block& block, const Plan& plan, const char* from, char* to,
                                int64_t packs) {
    (void)((plan.dtype == DTypeTraits<Ts>::dtype &&
            (sum_packs<Ts>(block, from, to, packs, plan.divisor), true)) ||
           ...);
  }
};
using MultimemTypes = MultimemList<Float16, BFloat16, float>;

}  // namespace jaxring::cuda
