#include "xla_ffi/transport/record_ring.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <thread>
#include <vector>

namespace jaxring {
namespace {

constexpr int64_t kRingBytes = 4096;

struct SmallRing {
  SmallRing() : memory(kRingBytes / sizeof(Line)) {}
  struct alignas(64) Line {
    char bytes[64] = {};
  };
  std::vector<Line> memory;
  RecordRing ring() { return RecordRing(memory[0].bytes, kRingBytes); }
};

// The writer laps the ring many times with payloads of every length and content that looks like
// stamps.
TEST(RecordRing, EveryRecordArrivesOnceAndInOrderAtEveryReader) {
  SmallRing memory;
  const RecordRing ring = memory.ring();
  RecordCursor cursors[2];
  const int kRecords = 20000;
  auto payload_of = [](int i) {
    std::string payload((i * 37) % 900, '\0');
    for (size_t at = 0; at + 8 <= payload.size(); at += 8) {
      const uint64_t like_a_stamp = static_cast<uint64_t>(i) * 64 + at + 1;
      std::memcpy(&payload[at], &like_a_stamp, 8);
    }
    return payload;
  };
  std::thread writing([&] {
    RecordWriter writer;
    for (int i = 0; i < kRecords; ++i) {
      const std::string payload = payload_of(i);
      RecordHeader header;
      header.call = i;
      header.payload_bytes = payload.size();
      auto oldest = [&] {
        return std::min(cursors[0].position.load(std::memory_order_acquire),
                        cursors[1].position.load(std::memory_order_acquire));
      };
      while (!writer.try_write(ring, header, payload.data(), oldest)) std::this_thread::yield();
    }
  });
  auto read = [&](RecordCursor& cursor) {
    RecordReader reader;
    int next = 0;
    while (next < kRecords) {
      const bool any =
          reader.poll(ring, cursor, [&](const RecordHeader& header, const char* payload) {
            ASSERT_EQ(header.call, static_cast<uint32_t>(next));
            ASSERT_EQ(std::string(payload, header.payload_bytes), payload_of(next));
            ++next;
          });
      if (!any) std::this_thread::yield();
      if (::testing::Test::HasFatalFailure()) return;
    }
  };
  std::thread first([&] { read(cursors[0]); });
  read(cursors[1]);
  first.join();
  writing.join();
}

// A peer that writes nonsense cannot make the reader leave the ring.
TEST(RecordRing, GarbageLengthsAreNotBelieved) {
  std::mt19937 random(3);
  for (int round = 0; round < 2000; ++round) {
    SmallRing memory;
    for (auto& line : memory.memory) {
      for (char& byte : line.bytes) byte = static_cast<char>(random());
    }
    const RecordRing ring = memory.ring();
    for (int64_t at = 0; at < kRingBytes; at += 64) {
      if (random() % 2) ring.stamp(at).store(at + 1);  // a plausible stamp before a random header
    }
    RecordReader reader;
    RecordCursor cursor;
    reader.poll(ring, cursor, [&](const RecordHeader& header, const char* payload) {
      ASSERT_LE(payload + header.payload_bytes, ring.at(0) + kRingBytes);
    });
  }
}

}  // namespace
}  // namespace jaxring
