// FIFOs in this process's own memory, between ranks that are devices (or tests' threads) of one
// process.
#pragma once

#include <memory>

#include "xla_ffi/transport/end_table.h"
#include "xla_ffi/transport/transport.h"

namespace jaxring {

class InProcessTransport final : public FifoTransport {
 public:
  explicit InProcessTransport(int rank_count) : fifos_(rank_count) {}

  Sender& sender(int from_rank, int to_rank, int channel) override {
    return fifo(from_rank, to_rank, channel).sender;
  }
  Receiver& receiver(int from_rank, int to_rank, int channel) override {
    return fifo(from_rank, to_rank, channel).receiver;
  }

  // Forgets what is under way; for when an operation ended in the middle. Nobody may be using a
  // FIFO.
  void reset() { fifos_.clear(); }

 private:
  struct Fifo {
    Fifo()
        : memory(new char[kFifoSlotBytes * kFifoSlotCount]),
          location{&counters, memory.get(), kFifoSlotBytes, kFifoSlotCount},
          sender(location),
          receiver(location) {}
    FifoCounters counters;
    std::unique_ptr<char[]> memory;  // untouched pages cost nothing
    MemoryFifo location;
    MemorySender sender;
    MemoryReceiver receiver;
  };

  // A FIFO comes into being when a schedule first uses its pair of ranks.
  Fifo& fifo(int from_rank, int to_rank, int channel) {
    return fifos_.get(from_rank, to_rank, channel, [] { return std::make_unique<Fifo>(); });
  }

  EndTable<Fifo> fifos_;
};

}  // namespace jaxring
