// Processes of one host share one anonymous memory segment (memfd). It has no name in any file
// system, so nothing is left behind however the processes die, and a small /dev/shm does not
// matter. The leader creates it; the others open it through /proc/<pid>/fd and show a random token
// to be sure it is the one.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "xla_ffi/transport/record_ring.h"
#include "xla_ffi/transport/transport.h"

namespace jaxring {

struct SegmentHeader;
struct ProcessBlock;

// The mapping itself. Creating and attaching throw std::runtime_error with the reason.
class Segment {
 public:
  static std::shared_ptr<Segment> create(int process_count, int rank_count);
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
  int fd_ = -1;
  char* base_ = nullptr;
  int process_count_;
  int rank_count_;
};

// Both roles of one process on a segment.
class ShmTransport final : public FifoTransport, public RecordTransport {
 public:
  ShmTransport(std::shared_ptr<Segment> segment, int self_process);
  ~ShmTransport() override;

  Sender& sender(int from_rank, int to_rank, int channel) override;
  Receiver& receiver(int from_rank, int to_rank, int channel) override;

  bool try_post(const RecordHeader& header, const char* payload) override;
  bool poll(const Handler& handler) override;
  uint32_t prepare_sleep() override;
  void sleep(uint32_t ticket, std::chrono::microseconds at_most) override;
  void cancel_sleep() override;
  void wake(int process) override;
  bool all_attached() const override;
  bool attached(int process) const override;
  int64_t pid_of(int process) const override;
  std::optional<int> find_dead_process() override;
  int64_t max_payload_bytes() const override;

 private:
  std::shared_ptr<Segment> segment_;
  const int self_;
  const int process_count_;
  RecordWriter writer_;
  std::vector<RecordReader> readers_;  // by process
  std::vector<int> pidfds_;            // by process; -1 until attached, -2 once reported dead
  std::mutex mutex_;                   // of the two maps
  std::map<std::tuple<int, int, int>, std::unique_ptr<MemorySender>> senders_;
  std::map<std::tuple<int, int, int>, std::unique_ptr<MemoryReceiver>> receivers_;
};

}  // namespace jaxring
