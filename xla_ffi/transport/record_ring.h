// A ring of records in shared memory: one writing process, several readers, each with its own
// cursor.
//
// A record is a header line of 64 bytes, whose last 24 bytes hold the first of the payload, and
// further lines as needed; it never wraps. The header's stamp is its position plus one and is
// stored last, so a reader sees header and (small) payload in the one cache line it polls. Whatever
// a lap ago stood where the next header will be is zeroed before a record is published: old payload
// never looks like a stamp.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "xla_ffi/core/macros.h"
#include "xla_ffi/transport/transport.h"

namespace jaxring {

constexpr int64_t kLineBytes = JR_CACHE_LINE;
constexpr int64_t kRecordHeaderBytes = sizeof(std::atomic<uint64_t>) + sizeof(RecordHeader);
static_assert(kRecordHeaderBytes <= kLineBytes);

constexpr int64_t record_bytes(int64_t payload_bytes) {
  return (kRecordHeaderBytes + payload_bytes + kLineBytes - 1) / kLineBytes * kLineBytes;
}

// How far a reader has come; written by the reader, read by the writer. On its own line.
struct alignas(JR_CACHE_LINE) RecordCursor {
  std::atomic<uint64_t> position{0};
};

class RecordRing {
 public:
  RecordRing() = default;
  RecordRing(char* data, int64_t bytes) : data_(data), bytes_(bytes) {}

  std::atomic<uint64_t>& stamp(uint64_t position) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(at(position));
  }
  char* at(uint64_t position) const { return data_ + position % bytes_; }
  int64_t room_to_end(uint64_t position) const { return bytes_ - position % bytes_; }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

class RecordWriter {
 public:
  // `oldest_cursor` gives the position of the slowest reader; it is asked only when the ring seems
  // full.
  template <class OldestCursor>
  bool try_write(RecordRing ring, const RecordHeader& header, const char* payload,
                 OldestCursor&& oldest_cursor) {
    const int64_t needed = record_bytes(header.payload_bytes);
    const int64_t room = ring.room_to_end(position_);
    const int64_t skipped = room < needed ? room : 0;  // a record never wraps
    const uint64_t end = position_ + skipped + needed;
    // one line more: the stamp of the next header is zeroed too
    if (static_cast<int64_t>(end + kLineBytes - oldest_) > ring.bytes()) {
      oldest_ = oldest_cursor();
      if (static_cast<int64_t>(end + kLineBytes - oldest_) > ring.bytes()) return false;
    }
    if (skipped > 0) {
      RecordHeader skip;
      skip.type = kSkip;
      write(ring, skip, "", position_ + skipped);
    }
    write(ring, header, payload, end);
    return true;
  }

  static constexpr uint16_t kSkip = 0xFFFF;  // the reader goes on at the start of the ring

 private:
  void write(RecordRing ring, const RecordHeader& header, const char* payload, uint64_t end) {
    ring.stamp(end).store(0, std::memory_order_relaxed);
    char* line = ring.at(position_);
    std::memcpy(line + sizeof(uint64_t), &header, sizeof header);
    if (header.payload_bytes > 0) {
      std::memcpy(line + kRecordHeaderBytes, payload, header.payload_bytes);
    }
    // seq_cst: publishes the record and orders it before the poster's look at who sleeps.
    ring.stamp(position_).store(position_ + 1, std::memory_order_seq_cst);
    position_ = end;
  }

  uint64_t position_ = 0;
  uint64_t oldest_ = 0;
};

class RecordReader {
 public:
  // Calls f(header, payload) for each record that has arrived; true if there was one.
  template <class F>
  bool poll(RecordRing ring, RecordCursor& cursor, F&& f) {
    bool any = false;
    RecordHeader header;
    while (const char* payload = peek(ring, cursor, &header)) {
      f(header, payload);
      release(ring, cursor, header);
      any = true;
    }
    return any;
  }

  // The oldest unread record's payload, or null; it stays until it is released.
  const char* peek(RecordRing ring, RecordCursor& cursor, RecordHeader* header) {
    while (ring.stamp(position_).load(std::memory_order_seq_cst) == position_ + 1) {
      const char* line = ring.at(position_);
      std::memcpy(header, line + sizeof(uint64_t), sizeof *header);
      const int64_t room = ring.room_to_end(position_);
      if (header->type != RecordWriter::kSkip) {
        // The writer is another process: a length it cannot have written must not send us astray.
        if (record_bytes(header->payload_bytes) > room) return nullptr;
        return line + kRecordHeaderBytes;
      }
      advance(ring, cursor, room);
    }
    return nullptr;
  }

  void release(RecordRing ring, RecordCursor& cursor, const RecordHeader& header) {
    advance(ring, cursor, record_bytes(header.payload_bytes));
  }

 private:
  // The cursor travels to the writer now and then, not for each record: it costs a cache miss
  // there.
  void advance(RecordRing ring, RecordCursor& cursor, int64_t bytes) {
    position_ += bytes;
    if (position_ - published_ >= static_cast<uint64_t>(ring.bytes() / 8)) {
      cursor.position.store(published_ = position_, std::memory_order_release);
    }
  }

  uint64_t position_ = 0;
  uint64_t published_ = 0;
};

}  // namespace jaxring
