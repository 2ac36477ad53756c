// One ordering at a time can be taken away from the kernels, to prove that the emulation would
// notice (tests/cuda/mutations.py). Only a build with JR_MUTATIONS, which is for host
// threads, can do so; elsewhere all of this is constant and costs nothing.
#pragma once

#include <cstdint>

#include "xla_ffi/core/macros.h"

namespace jaxring::cuda {

// X(enumerator, what is taken away)
#define JR_FOR_EACH_MUTATION(X)                                                             \
  X(kNone, "nothing")                                                                       \
  X(kArrivalBarrier, "staged: barrier between a block's last access and its arrival")       \
  X(kArrivalRelease, "staged: release of the arrival flag")                                 \
  X(kArrivalAcquire, "staged: acquire of the peers' arrival flags")                         \
  X(kArrivalJoin, "staged: barrier between the threads that wait and those that read")      \
  X(kArrivalWait, "staged: the wait for the peers' arrival")                                \
  X(kOneShotParity, "one-shot: second staging buffer")                                      \
  X(kTwoShotInParity, "two-shot: second buffer of operands")                                \
  X(kTwoShotOutParity, "two-shot: second buffer of sums")                                   \
  X(kTwoShotSecondWait, "two-shot: the wait for the peers' sums")                           \
  X(kMultimemParity, "multimem: second buffer of operands")                                 \
  X(kMultimemSumsParity, "multimem: second buffer of sums")                                 \
  X(kMultimemSecondWait, "multimem: the wait for the peers' sums")                          \
  X(kMultimemFence, "multimem: proxy fence before what is staged is reduced")               \
  X(kMultimemSumsFence, "multimem: proxy fence before the sums are read")                   \
  X(kPacketFlag, "packets: waiting for the flag of each packet")                            \
  X(kPacketAtomic, "packets: data and flag in one store (two here)")                        \
  X(kPacketParity, "packets: second packet buffer")                                         \
  X(kPacketEmpty, "packets: one packet also where there is no payload")                     \
  X(kPacketRefresh, "packets: rewriting of old packets before flags come round")            \
  X(kEpochBarrier, "packets: barrier between reading and advancing a block's epoch")        \
  X(kFifoAcquireBarrier, "FIFO: barrier between the threads that wait and those that move") \
  X(kFifoReleaseBarrier, "FIFO: barrier between the last access of a slot and its release") \
  X(kFifoProducedRelease, "FIFO: release of a filled slot")                                 \
  X(kFifoProducedAcquire, "FIFO: acquire of a filled slot")                                 \
  X(kFifoConsumedRelease, "FIFO: release of a slot that has been read")                     \
  X(kFifoConsumedAcquire, "FIFO: acquire of a slot that has been read")                     \
  X(kFifoRoom, "FIFO: waiting for room (one slot too many)")                                \
  X(kFirstWriter, "failure: first writer of the status word wins (the last does)")          \
  X(kStallWord, "failure: telling of a long wait")                                          \
  X(kAbortWord, "failure: looking at the abort word")                                       \
  X(kPoison, "failure: NaN in the output")

enum class Mutation : int {
#define JR_X(enumerator, what) enumerator,
  JR_FOR_EACH_MUTATION(JR_X)
#undef JR_X
};

#if defined(JR_MUTATIONS)
inline Mutation current_mutation = Mutation::kNone;
inline bool mutated(Mutation mutation) { return mutation == current_mutation; }
#else
JR_HOST_DEVICE constexpr bool mutated(Mutation) { return false; }
#endif

// The block's operations, each of which `mutation` weakens or omits.

template <class Block>
JR_DEVICE void barrier(Block& block, [[maybe_unused]] Mutation mutation) {
  if (!mutated(mutation)) block.barrier();
}

template <class Block>
JR_DEVICE void store_release(Block& block, uint64_t* address, uint64_t value,
                             [[maybe_unused]] Mutation mutation) {
#if defined(JR_MUTATIONS)
  if (mutated(mutation)) return block.store_relaxed(address, value);
#endif
  block.store_release(address, value);
}

template <class Block>
JR_DEVICE uint64_t load_acquire(Block& block, const uint64_t* address,
                                [[maybe_unused]] Mutation mutation) {
#if defined(JR_MUTATIONS)
  if (mutated(mutation)) return block.load_relaxed(address);
#endif
  return block.load_acquire(address);
}

}  // namespace jaxring::cuda
