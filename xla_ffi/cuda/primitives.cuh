// The device's Prims: a thread block runs a schedule's verbs over FIFOs in raw memory. The block is
// a template argument, CudaBlock on a GPU and host threads in tests/cpp/block_shim_test.cc, so that
// the protocol runs under ThreadSanitizer, which sees races whose results happen to be right.
//
// Unlike the host, which records steps and never blocks inside one, a block has its multiprocessor
// to itself and waits in place; each wait ends by its deadline or by an abort.
#pragma once

#include <cstdint>
#include <type_traits>

#include "xla_ffi/algorithms/prims.h"
#include "xla_ffi/core/dtype.h"
#include "xla_ffi/core/reduce_op.h"

// Members that host and device instantiate with different blocks call functions that exist on one
// side only.
#if defined(__CUDACC__)
#define JR_CALLS_EITHER_SIDE _Pragma("nv_exec_check_disable")
#else
#define JR_CALLS_EITHER_SIDE
#endif

namespace jaxring {

// The most peers that one verb reads from or writes to.
constexpr int kMaxBlockPeers = 31;

// One end of the FIFO to or from one peer on one channel. Zero counters and `step` are an empty
// FIFO.
struct FifoEnd {
  uint64_t* produced;  // slots that the sender has filled, ever
  uint64_t* consumed;  // slots that the receiver has given back, ever
  char* slots;
  uint64_t step;  // slots that this end has passed; outlives the kernel, so epochs need no argument
};

struct FifoShape {
  int64_t slot_bytes;
  int64_t slot_count;
};

// How a waiting block learns that it should stop, and tells that it has. In memory that the host
// can read.
struct Control {
  const uint64_t* abort;  // nonzero: stop
  uint64_t* status;       // 0, or what stopped a block: stopped_status()
  uint64_t timeout_ns;    // of each wait
};

// `rank` gave up waiting for `peer`.
JR_HOST_DEVICE constexpr uint64_t stopped_status(int rank, int peer) {
  return uint64_t{1} << 63 | static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(peer);
}

// A block's shared memory: where the slots of the slice under way are; null once a wait has failed.
struct SliceSlots {
  const void* received[kMaxBlockPeers];
  void* reserved[kMaxBlockPeers];
};

// What a block works on. `from` and `to` are indexed by rank.
template <typename T>
struct BlockWork {
  int rank;
  const T* input;
  T* output;  // may be `input`
  FifoEnd* from;
  FifoEnd* to;
  FifoShape fifo;
  Control control;
  int64_t divisor;  // of a mean
};

// T is the tensor's storage type and Functor the reduction.
template <class Block, typename T, class Functor>
class BlockPrims : public Verbs<BlockPrims<Block, T, Functor>> {
 public:
  using A = AccumulatorOf<T>;

  JR_HOST_DEVICE BlockPrims(Block& block, SliceSlots& slots, const BlockWork<T>& work)
      : block_(block), slots_(slots), work_(work) {}

  // Every thread of the block calls it, as it does each verb.
  JR_CALLS_EITHER_SIDE
  JR_HOST_DEVICE void step(Peers from, Peers to, Range range, bool use_input, bool write_output) {
    const int64_t slice_elements = work_.fifo.slot_bytes / static_cast<int64_t>(sizeof(A));
    for (int64_t done = 0; done < range.count && !stopped_; done += slice_elements) {
      const int64_t left = range.count - done;
      const Range slice{range.offset + done, left < slice_elements ? left : slice_elements};
      acquire_slots(from, to);
      block_.barrier();  // all slots are there, and every thread sees where
      if (any_missing(from, to)) {
        stopped_ = true;
        return;
      }
      for (int64_t i = block_.thread(); i < slice.count; i += block_.thread_count()) {
        element(from, to, slice.offset + i, i, use_input, write_output);
      }
      block_.barrier();  // all threads have read and written
      release_slots(from, to);
    }
  }

  // A wait has failed: control.status says whose, the output is not whole, and the FIFOs hold half
  // an operation, so that they must be reset before they are used again.
  JR_HOST_DEVICE bool stopped() const { return stopped_; }

 private:
  // Each end of a FIFO belongs to one thread of the block, which alone reads and writes its step.
  JR_CALLS_EITHER_SIDE
  JR_HOST_DEVICE bool owns(int peer, int end) const {
    return (2 * peer + end) % block_.thread_count() == block_.thread();
  }

  JR_CALLS_EITHER_SIDE
  JR_HOST_DEVICE void acquire_slots(Peers from, Peers to) {
    for (int i = 0; i < from.count(); ++i) {
      if (!owns(from[i], 0)) continue;
      const FifoEnd& end = work_.from[from[i]];
      slots_.received[i] = wait(end.produced, end.step + 1, from[i]) ? slot(end) : nullptr;
    }
    for (int i = 0; i < to.count(); ++i) {
      if (!owns(to[i], 1)) continue;
      const FifoEnd& end = work_.to[to[i]];
      const uint64_t slot_count = work_.fifo.slot_count;
      const uint64_t freed = end.step < slot_count ? 0 : end.step - slot_count + 1;
      slots_.reserved[i] = wait(end.consumed, freed, to[i]) ? slot(end) : nullptr;
    }
  }

  JR_CALLS_EITHER_SIDE
  JR_HOST_DEVICE void release_slots(Peers from, Peers to) {
    for (int i = 0; i < to.count(); ++i) {
      FifoEnd& end = work_.to[to[i]];
      if (owns(to[i], 1)) block_.store_release(end.produced, ++end.step);
    }
    for (int i = 0; i < from.count(); ++i) {
      FifoEnd& end = work_.from[from[i]];
      if (owns(from[i], 0)) block_.store_release(end.consumed, ++end.step);
    }
  }

  JR_HOST_DEVICE char* slot(const FifoEnd& end) const {
    return end.slots +
           static_cast<int64_t>(end.step % work_.fifo.slot_count) * work_.fifo.slot_bytes;
  }

  // Until *counter reaches `target`; false at the deadline or when aborted. The clock and the abort
  // word, which may be far away, are looked at once in a while.
  JR_CALLS_EITHER_SIDE
  JR_HOST_DEVICE bool wait(const uint64_t* counter, uint64_t target, int peer) {
    constexpr int kPollsPerCheck = 256;
    const uint64_t start_ns = block_.now_ns();
    for (int polls = 1; block_.load_acquire(counter) < target; ++polls) {
      block_.pause();
      if (polls % kPollsPerCheck != 0) continue;
      if (block_.now_ns() - start_ns > work_.control.timeout_ns ||
          block_.load_acquire(work_.control.abort) != 0) {
        // The first to give up is nearest to the cause; those that wait for it follow.
        if (block_.load_acquire(work_.control.status) == 0) {
          block_.store_release(work_.control.status, stopped_status(work_.rank, peer));
        }
        return false;
      }
    }
    return true;
  }

  JR_HOST_DEVICE bool any_missing(Peers from, Peers to) const {
    bool missing = false;
    for (int i = 0; i < from.count(); ++i) missing |= slots_.received[i] == nullptr;
    for (int i = 0; i < to.count(); ++i) missing |= slots_.reserved[i] == nullptr;
    return missing;
  }

  // The generic step for one element, `position` of the message and `i` of the slice: operands in
  // rank order -> output and peers.
  JR_HOST_DEVICE void element(Peers from, Peers to, int64_t position, int64_t i, bool use_input,
                              bool write_output) const {
    if (!use_input) {  // a final value that travels on
      const T value = static_cast<const T*>(slots_.received[0])[i];
      work_.output[position] = value;
      for (int p = 0; p < to.count(); ++p) static_cast<T*>(slots_.reserved[p])[i] = value;
      return;
    }
    const A sum = reduced(from, i, static_cast<A>(work_.input[position]));
    if (!write_output) {
      for (int p = 0; p < to.count(); ++p) static_cast<A*>(slots_.reserved[p])[i] = sum;
      return;
    }
    const T value = finished(sum);
    work_.output[position] = value;
    for (int p = 0; p < to.count(); ++p) static_cast<T*>(slots_.reserved[p])[i] = value;
  }

  JR_HOST_DEVICE A reduced(Peers from, int64_t i, A own) const {
    const int count = from.count();
    if (count == 0) return own;
    // Peers ascend, so the own term goes in before the first that is greater.
    bool own_pending = work_.rank > from[0];
    A sum = own_pending ? static_cast<const A*>(slots_.received[0])[i] : own;
    for (int p = own_pending ? 1 : 0; p < count; ++p) {
      if (own_pending && from[p] > work_.rank) {
        sum = Functor()(sum, own);
        own_pending = false;
      }
      sum = Functor()(sum, static_cast<const A*>(slots_.received[p])[i]);
    }
    return own_pending ? Functor()(sum, own) : sum;
  }

  JR_HOST_DEVICE T finished(A sum) const {
    if constexpr (std::is_same_v<Functor, Mean>) sum = divide(sum, work_.divisor);
    return static_cast<T>(sum);
  }

  Block& block_;
  SliceSlots& slots_;
  const BlockWork<T> work_;
  bool stopped_ = false;
};

}  // namespace jaxring
