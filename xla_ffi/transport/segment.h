// Processes of one host share one anonymous memory segment (memfd). It has no name in any file
// system, so nothing is left behind however the processes die, and a small /dev/shm does not
// matter. The leader creates it; the others open it through /proc/<pid>/fd and show a random token
// to be sure it is the one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "xla_ffi/core/macros.h"
#include "xla_ffi/transport/record_ring.h"
#include "xla_ffi/transport/transport.h"

namespace jaxring {

struct alignas(JR_CACHE_LINE) SegmentHeader {
  uint64_t magic;
  uint64_t token;
  int32_t process_count;
  int32_t rank_count;
  std::atomic<int32_t> attached;
};

struct alignas(JR_CACHE_LINE) ProcessBlock {
  std::atomic<int64_t> pid;
  alignas(JR_CACHE_LINE) std::atomic<uint32_t> doorbell;  // a futex
  std::atomic<uint32_t> sleepers;
  std::atomic<uint32_t> alarm;  // on the line that posters look at anyway
};

// Header, process blocks, cursors, record rings, FIFOs: each part's offset.
struct SegmentLayout {
  SegmentLayout(int process_count, int rank_count);
  int64_t processes, cursors, rings, counters, slots, bytes;
};

// The mapping itself. Creating and attaching throw std::runtime_error with the reason.
class Segment {
 public:
  // Where memfd_create is forbidden (or not wanted: tests) it is an unnamed file in TMPDIR.
  static std::shared_ptr<Segment> create(int process_count, int rank_count, bool with_memfd = true);
  static std::shared_ptr<Segment> attach(const std::string& address, int process_count,
                                         int rank_count);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // "pid fd token", for the others' attach(); valid while this process lives and the file is open.
  std::string address() const;
  void close_file();  // once all have attached

  SegmentHeader& header() const;
  ProcessBlock& process(int index) const;
  RecordCursor& cursor(int reader, int writer) const;
  RecordRing record_ring(int writer) const;
  MemoryFifo fifo(int from_rank, int to_rank, int channel) const;

 private:
  Segment(int fd, int process_count, int rank_count);
  static int open_anonymous(int64_t bytes, bool with_memfd);
  int fd_ = -1;
  char* base_ = nullptr;
  int process_count_;
  int rank_count_;
  SegmentLayout layout_;
};

}  // namespace jaxring
