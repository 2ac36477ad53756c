#include "xla_ffi/transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "xla_ffi/transport/end_table.h"

namespace jaxring {

constexpr uint64_t kSegmentMagic = 0x31676e697278616a;  // "jaxring1"
constexpr int64_t kRecordRingBytes = 1 << 20;
constexpr int64_t kPageBytes = 4096;

namespace {

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::strerror(errno));
}

}  // namespace

SegmentLayout::SegmentLayout(int process_count, int rank_count) {
  const int64_t fifos = int64_t{rank_count} * rank_count * kMaxChannels;
  processes = round_up(sizeof(SegmentHeader), kPageBytes);
  cursors = round_up(processes + process_count * sizeof(ProcessBlock), kPageBytes);
  rings = round_up(cursors + process_count * process_count * sizeof(RecordCursor), kPageBytes);
  counters = rings + process_count * kRecordRingBytes;
  slots = round_up(counters + fifos * sizeof(FifoCounters), kPageBytes);
  bytes = slots + fifos * kFifoSlotBytes * kFifoSlotCount;
}

// Memory without a name in any file system, sized and readable by this user only.
int Segment::open_anonymous(int64_t bytes, bool with_memfd) {
  int fd = -1;
  if (with_memfd) fd = static_cast<int>(syscall(SYS_memfd_create, "jaxring", 1u /* MFD_CLOEXEC */));
  const bool is_file = fd < 0;  // memfd_create is forbidden here (seccomp)
  if (is_file) {
    const char* folder = std::getenv("TMPDIR");
    fd = open(folder != nullptr && *folder != '\0' ? folder : "/tmp",
              O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  }
  if (fd < 0) fail("jaxring could not create shared memory, neither by memfd_create nor in TMPDIR");
  // A memfd is sparse: pages of FIFOs that no schedule uses are never allocated. A file's blocks
  // are taken now, because a full disk would show as SIGBUS later.
  const int refused = is_file                     ? posix_fallocate(fd, 0, bytes)
                      : ftruncate(fd, bytes) != 0 ? errno
                                                  : 0;
  if (refused != 0 || fchmod(fd, 0600) != 0) {
    const int reason = refused != 0 ? refused : errno;
    close(fd);
    errno = reason;
    fail("jaxring could not size its shared memory to " + std::to_string(bytes >> 20) + " MiB");
  }
  return fd;
}

std::shared_ptr<Segment> Segment::create(int process_count, int rank_count, bool with_memfd) {
  const int fd = open_anonymous(SegmentLayout(process_count, rank_count).bytes, with_memfd);
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
  if (fstat(fd, &status) != 0 || status.st_size != SegmentLayout(process_count, rank_count).bytes) {
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
    : fd_(fd),
      process_count_(process_count),
      rank_count_(rank_count),
      layout_(process_count, rank_count) {
  void* base =
      mmap(nullptr, layout_.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) {
    close_file();
    fail("jaxring could not map its shared memory segment");
  }
  base_ = static_cast<char*>(base);
}

Segment::~Segment() {
  close_file();
  munmap(base_, layout_.bytes);
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
  return reinterpret_cast<ProcessBlock*>(base_ + layout_.processes)[index];
}

RecordCursor& Segment::cursor(int reader, int writer) const {
  return reinterpret_cast<RecordCursor*>(base_ + layout_.cursors)[writer * process_count_ + reader];
}

RecordRing Segment::record_ring(int writer) const {
  return RecordRing(base_ + layout_.rings + writer * kRecordRingBytes, kRecordRingBytes);
}

MemoryFifo Segment::fifo(int from_rank, int to_rank, int channel) const {
  const int64_t index = fifo_index(from_rank, to_rank, channel, rank_count_);
  return MemoryFifo{reinterpret_cast<FifoCounters*>(base_ + layout_.counters) + index,
                    base_ + layout_.slots + index * kFifoSlotBytes * kFifoSlotCount, kFifoSlotBytes,
                    kFifoSlotCount};
}

}  // namespace jaxring
