#include "xla_ffi/transport/shm.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "xla_ffi/transport/futex.h"

namespace jaxring {

constexpr int64_t kMaxRecordPayloadBytes = 64 << 10;

ShmTransport::ShmTransport(std::shared_ptr<Segment> segment, int self_process,
                           std::unique_ptr<Links> links, std::vector<int> hosts)
    : segment_(std::move(segment)),
      self_(self_process),
      process_count_(segment_->header().process_count),
      links_(std::move(links)),
      hosts_(std::move(hosts)),
      readers_(process_count_),
      rings_(process_count_),
      pidfds_(process_count_, -1),
      senders_(segment_->header().rank_count),
      receivers_(segment_->header().rank_count) {
  std::vector<RecordCursor*> of_others(process_count_);
  for (int p = 0; p < process_count_; ++p) {
    rings_[p] = is_here(p) ? segment_->record_ring(p) : links_->inbox(p);
    of_others[p] = &segment_->cursor(p, self_);
    if (p != self_ && is_here(p)) here_.push_back(p);
  }
  if (links_) links_->bind(rings_[self_], std::move(of_others), [this] { wake(self_); });
  segment_->process(self_).pid.store(getpid(), std::memory_order_release);
  segment_->header().attached.fetch_add(1, std::memory_order_acq_rel);
}

ShmTransport::~ShmTransport() {
  disconnect();
  for (int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

Sender& ShmTransport::sender(int from_rank, int to_rank, int channel) {
  if (links_ && links_->crosses(from_rank, to_rank)) {
    return links_->sender(from_rank, to_rank, channel);
  }
  return senders_.get(from_rank, to_rank, channel, [&] {
    return std::make_unique<MemorySender>(segment_->fifo(from_rank, to_rank, channel));
  });
}

Receiver& ShmTransport::receiver(int from_rank, int to_rank, int channel) {
  if (links_ && links_->crosses(from_rank, to_rank)) {
    return links_->receiver(from_rank, to_rank, channel);
  }
  return receivers_.get(from_rank, to_rank, channel, [&] {
    return std::make_unique<MemoryReceiver>(segment_->fifo(from_rank, to_rank, channel));
  });
}

int64_t ShmTransport::max_payload_bytes() const { return kMaxRecordPayloadBytes; }

bool ShmTransport::try_post(const RecordHeader& header, const char* payload) {
  auto oldest_cursor = [&] {
    uint64_t oldest = UINT64_MAX;
    for (int p = 0; p < process_count_; ++p) {
      if (p == self_) continue;
      // acquire: the reader's reads happened before we overwrite
      oldest =
          std::min(oldest, segment_->cursor(p, self_).position.load(std::memory_order_acquire));
    }
    return oldest;
  };
  if (!writer_.try_write(rings_[self_], header, payload, oldest_cursor)) return false;
  for (int p : here_) wake(p);
  if (links_) links_->progress();
  return true;
}

RecordCursor& ShmTransport::cursor_of(int process) const {
  return is_here(process) ? segment_->cursor(self_, process) : links_->inbox_cursor(process);
}

void ShmTransport::disconnect() {
  if (links_ && !disconnected_.exchange(true)) links_->disconnect();
}

bool ShmTransport::poll(const Handler& handler) {
  bool any = false;
  if (links_) links_->progress();
  for (int p = 0; p < process_count_; ++p) {
    if (p == self_) continue;
    any |= readers_[p].poll(
        rings_[p], cursor_of(p),
        [&](const RecordHeader& header, const char* payload) { handler(p, header, payload); });
  }
  return any;
}

const char* ShmTransport::peek(int process, RecordHeader* header) {
  if (links_ && !is_here(process)) links_->progress();
  return readers_[process].peek(rings_[process], cursor_of(process), header);
}

void ShmTransport::release(int process, const RecordHeader& header) {
  readers_[process].release(rings_[process], cursor_of(process), header);
}

void ShmTransport::raise_alarm() {
  segment_->process(self_).alarm.store(1, std::memory_order_seq_cst);
  if (links_) links_->raise_alarm();
}

bool ShmTransport::alarm_raised() const {
  for (int p = 0; p < process_count_; ++p) {
    if (segment_->process(p).alarm.load(std::memory_order_seq_cst) != 0) return true;
  }
  return links_ && links_->alarm_raised();
}

// Dekker's pattern, all seq_cst: a sleeper raises `sleepers` and then looks at rings and FIFOs; a
// poster writes there and then looks at `sleepers`. One of the two sees the other.
uint32_t ShmTransport::prepare_sleep() {
  ProcessBlock& self = segment_->process(self_);
  self.sleepers.fetch_add(1, std::memory_order_seq_cst);
  return self.doorbell.load(std::memory_order_seq_cst);
}

void ShmTransport::sleep(uint32_t ticket, std::chrono::microseconds at_most) {
  if (links_) links_->will_sleep();
  ProcessBlock& self = segment_->process(self_);
  futex_wait(&self.doorbell, ticket, at_most, false);  // any return: the caller looks again
  cancel_sleep();
}

void ShmTransport::cancel_sleep() {
  segment_->process(self_).sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void ShmTransport::wake(int process) {
  if (links_ && !is_here(process)) return links_->push(process);
  ProcessBlock& other = segment_->process(process);
  if (other.sleepers.load(std::memory_order_seq_cst) == 0) return;
  other.doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(&other.doorbell, false);
}

bool ShmTransport::all_attached() const {
  int expected = 1 + static_cast<int>(here_.size());
  if (segment_->header().attached.load(std::memory_order_acquire) != expected) return false;
  segment_->close_file();
  for (int p = 0; links_ && p < process_count_; ++p) {
    if (!is_here(p) && !links_->connected(p)) return false;
  }
  return true;
}

bool ShmTransport::attached(int process) const { return pid_of(process) != 0; }

int64_t ShmTransport::pid_of(int process) const {
  if (!is_here(process)) return links_->pid_of(process);
  return segment_->process(process).pid.load(std::memory_order_acquire);
}

// pidfds, not kill(pid, 0): that reports a zombie as alive.
std::optional<int> ShmTransport::find_dead_process() {
  for (int p = 0; p < process_count_; ++p) {
    if (p == self_ || pidfds_[p] == -2 || !attached(p)) continue;
    if (!is_here(p)) {
      if (!links_->is_dead(p)) continue;
      pidfds_[p] = -2;
      return p;
    }
    if (pidfds_[p] == -1) {
      pidfds_[p] = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid_of(p)), 0));
      if (pidfds_[p] < 0 && errno != ESRCH) {
        pidfds_[p] = -1;
        continue;
      }
    }
    pollfd entry{pidfds_[p], POLLIN, 0};
    const bool dead = pidfds_[p] < 0 || ::poll(&entry, 1, 0) > 0;
    if (dead) {
      if (pidfds_[p] >= 0) close(pidfds_[p]);
      pidfds_[p] = -2;
      return p;
    }
  }
  return std::nullopt;
}

}  // namespace jaxring
