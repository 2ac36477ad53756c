#include "xla_ffi/cuda_ffi/seat_exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/cuda_ffi/host_words.h"

namespace jaxring::cuda {
namespace {

constexpr auto kPause = std::chrono::microseconds(50);
// For copies that wait for no rank: at the deadline it is a missing rank that should be named.
constexpr auto kGrace = std::chrono::seconds(10);

std::string seconds_text(double seconds) {
  std::string text = std::to_string(seconds);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// Device memory for one exchange by NCCL.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) {
    if (Failure failure = backend().runtime->allocate_zeroed(&memory_, bytes)) {
      throw std::runtime_error(*failure);
    }
  }
  ~Buffer() {
    if (memory_ != nullptr) backend().runtime->release(memory_);
  }
  // A kernel that never ends still uses it, and releasing it would wait for that kernel.
  void leave() { memory_ = nullptr; }
  char* at(int64_t offset) const { return static_cast<char*>(memory_) + offset; }

 private:
  void* memory_ = nullptr;
};

}  // namespace

SeatExchange::SeatExchange(Seat& seat)
    : seat_(seat), on_device_(seat.device()), deadline_(SetUpClock::now() + settings().timeout()) {
  check(on_device_.failure());
}

SeatExchange::~SeatExchange() = default;

void SeatExchange::check(const Failure& failure) {
  if (!failure) return;
  Error error;
  error.kind = ErrorKind::kPeerError;
  error.message = "communicator " + seat_.key() + ": " + *failure;
  throw Failed{error};
}

bool SeatExchange::settle(SetUpClock::time_point deadline) {
  std::string why;
  for (;;) {
    switch (backend().runtime->query(seat_.stream_, &why)) {
      case StreamState::kDone:
        return true;
      case StreamState::kFailed:
        check(Failure(why));
        break;
      case StreamState::kBusy:
        break;
    }
    if (SetUpClock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPause);
  }
}

void SeatExchange::require_settled(const std::string& what) {
  if (!settle(deadline_ + kGrace)) check(Failure(what + " did not finish within timeout_s"));
}

void SeatExchange::fail_late(const std::vector<int>& missing) {
  Error error;
  error.kind = ErrorKind::kTimeoutError;
  error.missing_ranks = missing;
  std::string who;
  for (int rank : missing) {
    const bool known = rank < static_cast<int>(seat_.cards().size());
    who += (who.empty() ? "" : "; ") +
           (known ? describe(seat_.cards()[rank]) : "rank " + std::to_string(rank));
  }
  if (!missing.empty()) error.rank = missing.front();
  error.message = "communicator " + seat_.key() + " timed out after " +
                  seconds_text(settings().timeout_s) + " in the first run of a call: missing " +
                  (who.empty() ? "some rank" : who) +
                  "; see what these ranks are doing, or raise timeout_s if they are slow";
  throw Failed{error};
}

void SeatExchange::read_board(int rank, uint64_t number, std::string* text) {
  const char* slot =
      seat_.arenas_[rank] + seat_.arena_bytes_ + static_cast<int64_t>(number % 2) * kSlotBytes;
  char* staging = seat_.words_->staging;
  // The number alone first: one copy may fetch the text before the number.
  check(backend().runtime->copy(staging, slot, 8, seat_.stream_));
  require_settled("reading a peer's memory");
  uint64_t seen = 0;
  std::memcpy(&seen, staging, 8);
  if (seen != number) return;
  check(backend().runtime->copy(staging + 8, slot + 8, kTextBytes, seat_.stream_));
  require_settled("reading a peer's memory");
  text->assign(staging + 8, strnlen(staging + 8, kTextBytes));
}

std::vector<std::string> SeatExchange::over_boards(const std::string& text) {
  const uint64_t number = ++seat_.gathered_;
  char* slot = seat_.arenas_[seat_.rank()] + seat_.arena_bytes_ +
               static_cast<int64_t>(number % 2) * kSlotBytes;
  char* staging = seat_.words_->staging;
  std::memset(staging, 0, kSlotBytes);
  std::memcpy(staging, &number, 8);
  std::memcpy(staging + 8, text.data(), std::min<size_t>(text.size(), kTextBytes - 1));
  check(backend().runtime->copy(slot + 8, staging + 8, kTextBytes, seat_.stream_));
  check(backend().runtime->copy(slot, staging, 8, seat_.stream_));
  require_settled("writing to the arena");
  std::vector<std::string> texts(seat_.world_size());
  texts[seat_.rank()] = text;
  for (;;) {
    std::vector<int> missing;
    for (int rank = 0; rank < seat_.world_size(); ++rank) {
      if (texts[rank].empty()) read_board(rank, number, &texts[rank]);
      if (texts[rank].empty()) missing.push_back(rank);
    }
    if (missing.empty()) return texts;
    if (std::optional<Error> error = seat_.failure()) throw Failed{*error};
    if (SetUpClock::now() >= deadline_) fail_late(missing);
    std::this_thread::sleep_for(kPause);
  }
}

std::vector<std::string> SeatExchange::by_nccl(const Nccl& nccl, NcclComm comm,
                                               const std::string& bytes) {
  const int ranks = seat_.world_size();
  Buffer buffer((1 + ranks) * kTextBytes);
  std::string padded = bytes.substr(0, kTextBytes);
  padded.resize(kTextBytes);
  std::vector<char> all(ranks * kTextBytes);
  check(backend().runtime->copy(buffer.at(0), padded.data(), kTextBytes, seat_.stream_));
  check(nccl_failure(nccl,
                     nccl.all_gather(buffer.at(0), buffer.at(kTextBytes), kTextBytes, kNcclUint8,
                                     comm, seat_.stream_),
                     "ncclAllGather"));
  if (!settle(deadline_)) {
    buffer.leave();
    fail_late({});
  }
  check(backend().runtime->copy(all.data(), buffer.at(kTextBytes), static_cast<int64_t>(all.size()),
                                seat_.stream_));
  require_settled("reading an exchange's result");
  std::vector<std::string> texts;
  for (int rank = 0; rank < ranks; ++rank) {
    texts.emplace_back(all.data() + rank * kTextBytes, kTextBytes);
  }
  return texts;
}

}  // namespace jaxring::cuda
