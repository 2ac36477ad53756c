// Whatever another process writes into the shared segment (records, stamps, cursors, FIFO counters,
// slots, its pid) must neither crash this process, nor make it touch memory outside, nor keep an
// operation from ending. The input is a program of a hostile peer.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <vector>

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/transport/shm.h"

namespace jaxring {
namespace {

constexpr int kWorldSize = 3;  // a process each; this one is rank 0, the leader, or rank 1

class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  bool empty() const { return left_ == 0; }
  uint8_t byte() {
    if (left_ == 0) return 0;
    --left_;
    return *data_++;
  }
  template <typename T>
  T value() {
    T result{};
    take(&result, sizeof result);
    return result;
  }
  void take(void* to, size_t count) {
    count = std::min(count, left_);
    std::memcpy(to, data_, count);
    data_ += count;
    left_ -= count;
  }

 private:
  const uint8_t* data_;
  size_t left_;
};

std::shared_ptr<const CallInfo> call(Collective collective, int64_t count) {
  auto info = std::make_shared<CallInfo>();
  info->collective = collective;
  info->algorithm = Algorithm::kAuto;
  if (collective == Collective::kPermute) info->destinations = {1, 2, 0};
  info->signature = Signature(std::string(name_of(collective)) + std::to_string(count));
  return info;
}

// An operation of ours, with buffers of exactly its size, so that the sanitizer sees any excess.
struct Own {
  std::vector<float> in, out;
  std::promise<void> ended;
  bool at_once = false;
};

class Victim {
 public:
  explicit Victim(int self) : self_(self), segment_(Segment::create(kWorldSize, kWorldSize)) {
    CommunicatorSpec spec;
    spec.key = "fuzz";
    spec.processes = {0, 1, 2};
    spec.self_process = self;
    communicator_ = std::make_unique<Communicator>(spec);
    communicator_->attach(segment_);
  }

  void submit(Bytes& bytes) {
    constexpr int64_t kCounts[] = {0, 3, 999, 30000};  // in blocks: of the message
    const auto collective = static_cast<Collective>(bytes.byte() % 8);
    const int64_t count = collective == Collective::kBarrier ? 0 : kCounts[bytes.byte() % 4];
    const bool gathers = collective == Collective::kAllGather;
    const bool scatters = collective == Collective::kReduceScatter;
    auto own = std::make_shared<Own>();
    own->in.resize(gathers ? count / kWorldSize : count);
    own->out.resize(scatters ? count / kWorldSize : count);
    Request request;
    request.info = call(collective, count);
    request.rank = self_;
    request.run_id = bytes.byte() % 4;
    request.call = bytes.byte() % 4;
    request.input.begin_at(gathers ? self_ * (count / kWorldSize) : 0);
    request.input.add(own->in.data(), own->in.size());
    request.output.begin_at(scatters ? self_ * (count / kWorldSize) : 0);
    request.output.add(own->out.data(), own->out.size());
    auto outcome = communicator_->submit(std::move(request), [&]() -> Completion {
      return [own](std::optional<Error>) { own->ended.set_value(); };
    });
    own->at_once = outcome.has_value();
    own_.push_back(std::move(own));
  }

  // A record as a peer of ours would write it, but for its content.
  void record(Bytes& bytes) {
    const int peer = peer_of(bytes.byte());
    RecordHeader header;
    header.type = bytes.byte() % 7;
    header.rank = bytes.byte() % 4;
    header.launch = bytes.byte() % 4;
    header.call = bytes.byte() % 4;
    const auto collective = static_cast<Collective>(bytes.byte() % 8);
    constexpr int64_t kCounts[] = {0, 3, 999, 30000};
    const int64_t count = collective == Collective::kBarrier ? 0 : kCounts[bytes.byte() % 4];
    header.signature =
        bytes.byte() % 4 != 0 ? call(collective, count)->signature.hash : bytes.value<uint64_t>();
    std::string payload(bytes.byte() % 2 ? count * 4 : bytes.byte() * 3, '\1');
    if (!payload.empty()) bytes.take(&payload[0], std::min<size_t>(payload.size(), 8));
    header.payload_bytes = static_cast<uint32_t>(payload.size());
    writers_[peer].try_write(segment_->record_ring(peer), header, payload.data(),
                             [&] { return segment_->cursor(self_, peer).position.load(); });
  }

  // Anything anywhere in what a peer may write to.
  void scribble(Bytes& bytes) {
    const int peer = peer_of(bytes.byte());
    char noise[64] = {};
    bytes.take(noise, sizeof noise);
    switch (bytes.byte() % 4) {
      case 0:
        std::memcpy(segment_->record_ring(peer).at(bytes.byte() * 64), noise, sizeof noise);
        break;
      case 1:
        segment_->cursor(peer, self_).position.store(bytes.value<uint64_t>());
        break;
      case 2:
        segment_->fifo(peer, self_, 0).counters->produced.store(bytes.value<uint64_t>());
        break;
      default:
        segment_->fifo(self_, peer, 0).counters->consumed.store(bytes.value<uint64_t>());
    }
  }

  // True if all that we began has ended.
  bool end() {
    Error error;
    error.kind = ErrorKind::kAbortedError;
    communicator_->fail(error);
    communicator_->close();
    for (const auto& own : own_) {
      if (own->at_once) continue;
      if (own->ended.get_future().wait_for(std::chrono::seconds(5)) != std::future_status::ready) {
        return false;
      }
    }
    return true;
  }

 private:
  int peer_of(int number) const { return (self_ + 1 + number % 2) % kWorldSize; }

  const int self_;
  std::shared_ptr<Segment> segment_;
  std::unique_ptr<Communicator> communicator_;
  RecordWriter writers_[kWorldSize];
  std::vector<std::shared_ptr<Own>> own_;
};

}  // namespace
}  // namespace jaxring

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  jaxring::Bytes bytes(data, size);
  const std::string text(reinterpret_cast<const char*>(data), std::min<size_t>(size, 64));
  try {  // the handshake: addresses come from a store that other processes write to
    jaxring::Segment::attach(text, jaxring::kWorldSize, jaxring::kWorldSize);
  } catch (const std::runtime_error&) {
  }
  jaxring::Victim victim(bytes.byte() % 2);
  for (int steps = 0; !bytes.empty() && steps < 40; ++steps) {
    switch (bytes.byte() % 4) {
      case 0:
        victim.submit(bytes);
        break;
      case 1:
        victim.scribble(bytes);
        break;
      default:
        victim.record(bytes);
    }
  }
  if (!victim.end()) std::abort();
  return 0;
}
