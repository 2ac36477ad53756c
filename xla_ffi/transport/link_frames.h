// What crosses a link: frames of a header and a payload, each one message of its endpoint.
#pragma once

#include <cstdint>

#include "xla_ffi/core/fifo.h"
#include "xla_ffi/core/macros.h"
#include "xla_ffi/core/sha256.h"

namespace jaxring {

enum class FrameKind : uint32_t {
  kHello,      // connector: who I am, and a nonce
  kChallenge,  // listener: a nonce, and proof that it knows the secret
  kProof,      // connector: the same proof
  kSlice,      // of a FIFO
  kRecords,
  kCredit,  // `count` more slices, or frames of records, may come
  kAlarm,
  kBye,     // nothing more will come
  kByeAck,  // all that was sent has been received
};

struct alignas(JR_CACHE_LINE) FrameHeader {
  FrameKind kind = FrameKind::kHello;
  uint32_t payload_bytes = 0;
  int32_t from_rank = -1;  // of a FIFO; -1: the records
  int32_t to_rank = -1;
  int32_t channel = 0;
  uint32_t count = 0;
};
static_assert(sizeof(FrameHeader) == JR_CACHE_LINE);  // what follows is aligned as a slot is

// What the two sides of a link agree on, by the communicator's layout.
struct FrameLayout {
  int64_t slice_bytes;

  // A record's header comes on top of the largest payload that one may have.
  int64_t payload_bytes() const { return slice_bytes + JR_CACHE_LINE; }
  int64_t bytes() const { return static_cast<int64_t>(sizeof(FrameHeader)) + payload_bytes(); }
  // Of a FIFO; as many again are in flight or wait to be read.
  uint32_t slots() const { return static_cast<uint32_t>(kLinkFifoBytes / slice_bytes); }
};

// The two sides of a connection introduce themselves. Every text is compared or cut to its size, so
// that what a stranger sends can do no harm.
struct Introduction {
  char magic[8];
  int32_t from_process;
  int32_t to_process;
  int64_t pid;
  uint8_t nonce[32];
  uint8_t proof[32];
  char host[128];
};
constexpr char kLinkMagic[9] = "jaxring2";
constexpr int64_t kControlBytes = sizeof(FrameHeader) + sizeof(Introduction);

constexpr int64_t kMostSlots = kLinkFifoBytes / kFifoSlotBytes;
constexpr int kRecordSendSlots = 4;
constexpr int kRecordCredits = 8;    // known to both sides, not granted at first
constexpr int kControlReceives = 8;  // buffers for all other frames, which are read at once
constexpr int kControlSendSlots = 32;

}  // namespace jaxring
