#include "xla_ffi/transport/shm.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>

namespace jaxring {

constexpr uint64_t kSegmentMagic = 0x31676e697278616a;  // "jaxring1"
constexpr int64_t kRecordRingBytes = 1 << 20;
constexpr int64_t kMaxRecordPayloadBytes = 64 << 10;
constexpr int64_t kPageBytes = 4096;

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
};

namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Header, process blocks, cursors, record rings, FIFOs: each part's offset.
struct Layout {
  int64_t processes, cursors, rings, counters, slots, bytes;

  Layout(int process_count, int rank_count) {
    const int64_t fifos = int64_t{rank_count} * rank_count * kMaxChannels;
    processes = round_up(sizeof(SegmentHeader), kPageBytes);
    cursors = round_up(processes + process_count * sizeof(ProcessBlock), kPageBytes);
    rings = round_up(cursors + process_count * process_count * sizeof(RecordCursor), kPageBytes);
    counters = rings + process_count * kRecordRingBytes;
    slots = round_up(counters + fifos * sizeof(FifoCounters), kPageBytes);
    bytes = slots + fifos * kFifoSlotBytes * kFifoSlotCount;
  }
};

int64_t fifo_index(int from_rank, int to_rank, int channel, int rank_count) {
  return (int64_t{channel} * rank_count + from_rank) * rank_count + to_rank;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, timeout, nullptr, 0);
}

}  // namespace

std::shared_ptr<Segment> Segment::create(int process_count, int rank_count) {
  const int fd = static_cast<int>(syscall(SYS_memfd_create, "jaxring", 1u /* MFD_CLOEXEC */));
  if (fd < 0) fail("jaxring could not create a shared memory segment (memfd_create)");
  // Sparse: pages of FIFOs that no schedule uses are never allocated.
  if (fchmod(fd, 0600) != 0 || ftruncate(fd, Layout(process_count, rank_count).bytes) != 0) {
    const int reason = errno;
    close(fd);
    errno = reason;
    fail("jaxring could not size its shared memory segment");
  }
  std::shared_ptr<Segment> segment(new Segment(fd, process_count, rank_count));
  SegmentHeader& header = segment->header();
  if (getrandom(&header.token, sizeof header.token, 0) != sizeof header.token) {
    fail("jaxring could not draw a random token");
  }
  header.process_count = process_count;
  header.rank_count = rank_count;
  header.magic = kSegmentMagic;
  return segment;
}

std::shared_ptr<Segment> Segment::attach(const std::string& address, int process_count,
                                         int rank_count) {
  long pid = 0;
  int remote_fd = 0;
  unsigned long long token = 0;
  if (std::sscanf(address.c_str(), "%ld %d %llx", &pid, &remote_fd, &token) != 3) {
    throw std::runtime_error("jaxring: '" + address + "' is not a segment address (pid fd token)");
  }
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(remote_fd);
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    fail("jaxring could not open the segment of process " + std::to_string(pid) + " (" + path +
         "); all ranks of a host must run as one user and in one PID namespace");
  }
  struct stat status;
  if (fstat(fd, &status) != 0 || status.st_size != Layout(process_count, rank_count).bytes) {
    close(fd);
    throw std::runtime_error("jaxring: the segment of process " + std::to_string(pid) +
                             " has another size than expected; do all ranks run the same jaxring?");
  }
  std::shared_ptr<Segment> segment(new Segment(fd, process_count, rank_count));
  segment->close_file();
  const SegmentHeader& header = segment->header();
  if (header.magic != kSegmentMagic || header.token != token ||
      header.process_count != process_count || header.rank_count != rank_count) {
    throw std::runtime_error("jaxring: process " + std::to_string(pid) +
                             " no longer holds the segment that was announced");
  }
  return segment;
}

Segment::Segment(int fd, int process_count, int rank_count)
    : fd_(fd), process_count_(process_count), rank_count_(rank_count) {
  void* base = mmap(nullptr, Layout(process_count, rank_count).bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    close_file();
    fail("jaxring could not map its shared memory segment");
  }
  base_ = static_cast<char*>(base);
}

Segment::~Segment() {
  close_file();
  munmap(base_, Layout(process_count_, rank_count_).bytes);
}

std::string Segment::address() const {
  char text[96];
  std::snprintf(text, sizeof text, "%ld %d %llx", static_cast<long>(getpid()), fd_,
                static_cast<unsigned long long>(header().token));
  return text;
}

void Segment::close_file() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

SegmentHeader& Segment::header() const { return *reinterpret_cast<SegmentHeader*>(base_); }

ProcessBlock& Segment::process(int index) const {
  return reinterpret_cast<ProcessBlock*>(base_ +
                                         Layout(process_count_, rank_count_).processes)[index];
}

RecordCursor& Segment::cursor(int reader, int writer) const {
  char* cursors = base_ + Layout(process_count_, rank_count_).cursors;
  return reinterpret_cast<RecordCursor*>(cursors)[writer * process_count_ + reader];
}

RecordRing Segment::record_ring(int writer) const {
  return RecordRing(base_ + Layout(process_count_, rank_count_).rings + writer * kRecordRingBytes,
                    kRecordRingBytes);
}

MemoryFifo Segment::fifo(int from_rank, int to_rank, int channel) const {
  const Layout layout(process_count_, rank_count_);
  const int64_t index = fifo_index(from_rank, to_rank, channel, rank_count_);
  return MemoryFifo{reinterpret_cast<FifoCounters*>(base_ + layout.counters) + index,
                    base_ + layout.slots + index * kFifoSlotBytes * kFifoSlotCount, kFifoSlotBytes,
                    kFifoSlotCount};
}

ShmTransport::ShmTransport(std::shared_ptr<Segment> segment, int self_process)
    : segment_(std::move(segment)),
      self_(self_process),
      process_count_(segment_->header().process_count),
      readers_(process_count_),
      pidfds_(process_count_, -1) {
  segment_->process(self_).pid.store(getpid(), std::memory_order_release);
  segment_->header().attached.fetch_add(1, std::memory_order_acq_rel);
}

ShmTransport::~ShmTransport() {
  for (int fd : pidfds_) {
    if (fd >= 0) close(fd);
  }
}

Sender& ShmTransport::sender(int from_rank, int to_rank, int channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& end = senders_[{from_rank, to_rank, channel}];
  if (!end) end = std::make_unique<MemorySender>(segment_->fifo(from_rank, to_rank, channel));
  return *end;
}

Receiver& ShmTransport::receiver(int from_rank, int to_rank, int channel) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& end = receivers_[{from_rank, to_rank, channel}];
  if (!end) end = std::make_unique<MemoryReceiver>(segment_->fifo(from_rank, to_rank, channel));
  return *end;
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
  if (!writer_.try_write(segment_->record_ring(self_), header, payload, oldest_cursor))
    return false;
  for (int p = 0; p < process_count_; ++p) {
    if (p != self_) wake(p);
  }
  return true;
}

bool ShmTransport::poll(const Handler& handler) {
  bool any = false;
  for (int p = 0; p < process_count_; ++p) {
    if (p == self_) continue;
    any |= readers_[p].poll(
        segment_->record_ring(p), segment_->cursor(self_, p),
        [&](const RecordHeader& header, const char* payload) { handler(p, header, payload); });
  }
  return any;
}

// Dekker's pattern, all seq_cst: a sleeper raises `sleepers` and then looks at rings and FIFOs; a
// poster writes there and then looks at `sleepers`. One of the two sees the other.
uint32_t ShmTransport::prepare_sleep() {
  ProcessBlock& self = segment_->process(self_);
  self.sleepers.fetch_add(1, std::memory_order_seq_cst);
  return self.doorbell.load(std::memory_order_seq_cst);
}

void ShmTransport::sleep(uint32_t ticket, std::chrono::microseconds at_most) {
  ProcessBlock& self = segment_->process(self_);
  const timespec timeout{at_most.count() / 1000000, at_most.count() % 1000000 * 1000};
  futex(&self.doorbell, FUTEX_WAIT, ticket, &timeout);  // any return: the caller looks again
  cancel_sleep();
}

void ShmTransport::cancel_sleep() {
  segment_->process(self_).sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

void ShmTransport::wake(int process) {
  ProcessBlock& other = segment_->process(process);
  if (other.sleepers.load(std::memory_order_seq_cst) == 0) return;
  other.doorbell.fetch_add(1, std::memory_order_seq_cst);
  futex(&other.doorbell, FUTEX_WAKE, 1 << 30, nullptr);
}

bool ShmTransport::all_attached() const {
  const bool all = segment_->header().attached.load(std::memory_order_acquire) == process_count_;
  if (all) segment_->close_file();
  return all;
}

bool ShmTransport::attached(int process) const { return pid_of(process) != 0; }

int64_t ShmTransport::pid_of(int process) const {
  return segment_->process(process).pid.load(std::memory_order_acquire);
}

// pidfds, not kill(pid, 0): that reports a zombie as alive.
std::optional<int> ShmTransport::find_dead_process() {
  for (int p = 0; p < process_count_; ++p) {
    if (p == self_ || pidfds_[p] == -2 || !attached(p)) continue;
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
