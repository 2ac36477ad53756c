// A FIFO moves slices from one rank to one peer on one channel. Schedules and the executor see only
// Sender and Receiver; a transport decides what lies between. MemoryFifo is the one for memory both
// sides can map: a process's own, or shared between processes.
#pragma once

#include <atomic>
#include <cstdint>

#include "xla_ffi/core/macros.h"

namespace jaxring {

// One FIFO per ordered pair of ranks and channel. 2 MiB each way: smaller rings rewrite lines that
// the peer still has in its cache and run at a quarter of the speed (docs/performance.md).
constexpr int64_t kFifoSlotBytes = 64 << 10;
constexpr int64_t kFifoSlotCount = 32;
constexpr int kMaxChannels = 2;

// Between hosts. A slice costs about ten system calls, whatever its size, so that larger ones are a
// fifth faster; where a schedule also has peers on its own host, slices are as theirs.
constexpr int64_t kLinkSliceBytes = 128 << 10;
constexpr int64_t kLinkFifoBytes = 1 << 20;

// The producing end. Neither call waits: who waits, how long and for what is decided in one place.
class Sender {
 public:
  virtual ~Sender() = default;
  virtual void* try_reserve() = 0;  // the next free slot, or nullptr while the peer has freed none
  // Hands the reserved slot to the peer, which needs its first `bytes` bytes only.
  virtual void publish(int64_t bytes) = 0;
};

// The consuming end.
class Receiver {
 public:
  virtual ~Receiver() = default;
  virtual const void* try_peek() = 0;  // the oldest unread slot, or nullptr while there is none
  virtual void release() = 0;          // gives it back to the sender
};

// Counters of a memory FIFO, each on its own cache line: the producer writes one, the consumer the
// other.
struct FifoCounters {
  alignas(JR_CACHE_LINE) std::atomic<uint64_t> produced{0};
  alignas(JR_CACHE_LINE) std::atomic<uint64_t> consumed{0};
};

// Where a FIFO lives. Zero-filled memory is an empty FIFO.
struct MemoryFifo {
  FifoCounters* counters = nullptr;
  char* slots = nullptr;
  int64_t slot_bytes = 0;
  int64_t slot_count = 0;

  char* slot(uint64_t step) const { return slots + (step % slot_count) * slot_bytes; }
};

class MemorySender final : public Sender {
 public:
  explicit MemorySender(MemoryFifo fifo) : fifo_(fifo) {}

  void* try_reserve() override {
    if (produced_ - consumed_seen_ == static_cast<uint64_t>(fifo_.slot_count)) {
      // acquire: the consumer's reads of the slot happened before we write it again
      consumed_seen_ = fifo_.counters->consumed.load(std::memory_order_acquire);
      if (produced_ - consumed_seen_ == static_cast<uint64_t>(fifo_.slot_count)) return nullptr;
    }
    return fifo_.slot(produced_);
  }

  void publish(int64_t /*bytes*/) override {
    // seq_cst, not release: the notifier next reads whether the peer sleeps, and the two must not
    // swap (store buffering; the sleeper does the mirror image).
    fifo_.counters->produced.store(++produced_, std::memory_order_seq_cst);
  }

 private:
  MemoryFifo fifo_;
  uint64_t produced_ = 0;
  uint64_t consumed_seen_ = 0;
};

class MemoryReceiver final : public Receiver {
 public:
  explicit MemoryReceiver(MemoryFifo fifo) : fifo_(fifo) {}

  const void* try_peek() override {
    if (produced_seen_ == consumed_) {
      // seq_cst pairs with publish(); it includes acquire, so the slot's bytes are visible
      produced_seen_ = fifo_.counters->produced.load(std::memory_order_seq_cst);
      if (produced_seen_ == consumed_) return nullptr;
    }
    return fifo_.slot(consumed_);
  }

  void release() override {
    fifo_.counters->consumed.store(++consumed_, std::memory_order_seq_cst);
  }

 private:
  MemoryFifo fifo_;
  uint64_t consumed_ = 0;
  uint64_t produced_seen_ = 0;
};

}  // namespace jaxring
