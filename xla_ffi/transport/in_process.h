// FIFOs in this process's own memory, between ranks that are devices (or tests' threads) of one
// process.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "xla_ffi/transport/transport.h"

namespace jaxring {

class InProcessTransport final : public FifoTransport {
 public:
  Sender& sender(int from_rank, int to_rank, int channel) override {
    return fifo(from_rank, to_rank, channel).sender;
  }
  Receiver& receiver(int from_rank, int to_rank, int channel) override {
    return fifo(from_rank, to_rank, channel).receiver;
  }

  // Forgets what is under way; for when an operation ended in the middle. Nobody may be using a
  // FIFO.
  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    fifos_.clear();
  }

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
    std::lock_guard<std::mutex> lock(mutex_);
    auto& slot = fifos_[{from_rank, to_rank, channel}];
    if (!slot) slot = std::make_unique<Fifo>();
    return *slot;
  }

  std::mutex mutex_;
  std::map<std::tuple<int, int, int>, std::unique_ptr<Fifo>> fifos_;
};

}  // namespace jaxring
