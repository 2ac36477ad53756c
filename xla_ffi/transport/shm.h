// Records and FIFOs between the processes of one host, in the segment that they share.
#pragma once

#include <memory>
#include <vector>

#include "xla_ffi/transport/end_table.h"
#include "xla_ffi/transport/links.h"
#include "xla_ffi/transport/record_ring.h"
#include "xla_ffi/transport/segment.h"
#include "xla_ffi/transport/transport.h"

namespace jaxring {

// Both roles of one process on a segment; with `links`, also towards the processes of other hosts.
class ShmTransport final : public FifoTransport, public RecordTransport {
 public:
  ShmTransport(std::shared_ptr<Segment> segment, int self_process,
               std::unique_ptr<Links> links = nullptr, std::vector<int> hosts = {});
  ~ShmTransport() override;

  Sender& sender(int from_rank, int to_rank, int channel) override;
  Receiver& receiver(int from_rank, int to_rank, int channel) override;

  bool try_post(const RecordHeader& header, const char* payload) override;
  bool poll(const Handler& handler) override;
  // The oldest unread record of a process, see RecordReader; one thread at a time, as poll().
  const char* peek(int process, RecordHeader* header);
  void release(int process, const RecordHeader& header);
  // Before a process posts that it has failed: others that find all they need for an operation
  // should read on before they finish it.
  void raise_alarm();
  bool alarm_raised() const;
  uint32_t prepare_sleep() override;
  void sleep(uint32_t ticket, std::chrono::microseconds at_most) override;
  void cancel_sleep() override;
  void wake(int process) override;
  bool all_attached() const override;
  bool attached(int process) const override;
  int64_t pid_of(int process) const override;
  std::optional<int> find_dead_process() override;
  int64_t max_payload_bytes() const override;

  // Connects to the processes of other hosts; `addresses` by process.
  void connect(const std::vector<std::string>& addresses) { links_->connect(addresses); }
  // Says goodbye to the other hosts; FIFOs that cross to them are not used any more.
  void disconnect();
  bool is_here(int process) const { return hosts_.empty() || hosts_[process] == hosts_[self_]; }
  std::string host_of(int process) const {
    return is_here(process) ? "" : links_->host_of(process);
  }
  std::string link_failure() const { return links_ ? links_->failure() : ""; }

 private:
  RecordCursor& cursor_of(int process) const;  // how far we have read what it has posted
  std::shared_ptr<Segment> segment_;
  const int self_;
  const int process_count_;
  const std::unique_ptr<Links> links_;  // null where all processes are on this host
  const std::vector<int> hosts_;        // by process
  std::atomic<bool> disconnected_{false};
  RecordWriter writer_;
  std::vector<RecordReader> readers_;  // by process
  std::vector<RecordRing> rings_;      // by process
  std::vector<int> pidfds_;            // by process; -1 until attached, -2 once reported dead
  std::vector<int> here_;              // the processes of this host but this one
  EndTable<MemorySender> senders_;
  EndTable<MemoryReceiver> receivers_;
};

}  // namespace jaxring
