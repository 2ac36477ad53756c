// What a communicator needs from whatever moves its bytes. Transports know ranks, processes and
// records; they know no algorithm, no key and no JAX.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>

#include "xla_ffi/core/error.h"
#include "xla_ffi/core/fifo.h"

namespace jaxring {

// X(enumerator, name, summary): the one list of transports.
#define JR_FOR_EACH_TRANSPORT(X)                                                     \
  X(kInProcess, "in_process", "devices of one process read each other's buffers")    \
  X(kSharedMemory, "shm", "processes of one host share an anonymous memory segment") \
  X(kLibfabric, "libfabric", "processes of several hosts are connected by libfabric's tcp or verbs")

enum class TransportKind : uint8_t {
#define JR_X(enumerator, name, summary) enumerator,
  JR_FOR_EACH_TRANSPORT(JR_X)
#undef JR_X
};

constexpr const char* name_of(TransportKind kind) {
  switch (kind) {
#define JR_X(enumerator, name, summary) \
  case TransportKind::enumerator:       \
    return name;
    JR_FOR_EACH_TRANSPORT(JR_X)
#undef JR_X
  }
  return "unknown transport";
}

// The ends of FIFOs between ranks.
class FifoTransport {
 public:
  virtual ~FifoTransport() = default;
  virtual Sender& sender(int from_rank, int to_rank, int channel) = 0;
  virtual Receiver& receiver(int from_rank, int to_rank, int channel) = 0;
};

// A short message from one process to all others: announcements, orders, failures.
struct RecordHeader {
  uint32_t launch = 0;
  uint32_t call = 0;
  uint32_t copy = 0;
  uint32_t iteration = 0;
  uint64_t signature = 0;
  uint32_t payload_bytes = 0;
  uint16_t rank = 0;  // whose announcement
  uint16_t type = 0;
};

// Record streams between processes: what one process posts, every other one reads, in order.
class RecordTransport {
 public:
  using Handler = std::function<void(int process, const RecordHeader&, const char* payload)>;

  virtual ~RecordTransport() = default;
  // False while a reader has not freed enough room. One thread at a time.
  virtual bool try_post(const RecordHeader& header, const char* payload) = 0;
  // Hands every record that has arrived to `handler`; true if there was one. One thread at a time.
  virtual bool poll(const Handler& handler) = 0;
  // Sleep in two steps, so that nothing that arrives in between is slept through:
  // prepare, look once more, then sleep (or not).
  virtual uint32_t prepare_sleep() = 0;
  virtual void sleep(uint32_t ticket, std::chrono::microseconds at_most) = 0;
  virtual void cancel_sleep() = 0;
  virtual void wake(int process) = 0;
  virtual bool all_attached() const = 0;
  virtual bool attached(int process) const = 0;
  virtual int64_t pid_of(int process) const = 0;
  // The first process found dead since the last call.
  virtual std::optional<int> find_dead_process() = 0;
  virtual int64_t max_payload_bytes() const = 0;
};

}  // namespace jaxring
