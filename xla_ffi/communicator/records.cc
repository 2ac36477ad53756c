// What processes tell each other. A record is small; what it says is checked before it is believed.
#include "xla_ffi/communicator/communicator.h"

namespace jaxring {
namespace {

// How long a process waits for the other ranks' signatures before it raises with those it has.
constexpr auto kDetailPatience = std::chrono::seconds(1);

// A signature has a few characters for each leaf; a record must fit into the ring.
constexpr size_t kLongestDetail = 64 << 10;

}  // namespace

// Records keep their order: once one waits in the outbox, the next ones queue behind it.
void Communicator::post(const RecordHeader& header, const std::string& payload) {
  RecordHeader sized = header;
  sized.payload_bytes = static_cast<uint32_t>(payload.size());
  ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (remote != nullptr && outbox_.empty() && remote->try_post(sized, payload.data())) return;
  // This rank's own operations may be done before others have heard of it, so somebody must see to
  // it.
  outbox_.emplace_back(sized, payload);
  need_progress_thread();
}

bool Communicator::flush_outbox() {
  ShmTransport* remote = remote_.load(std::memory_order_acquire);
  bool any = false;
  while (remote != nullptr && !outbox_.empty() &&
         remote->try_post(outbox_.front().first, outbox_.front().second.data())) {
    outbox_.pop_front();
    any = true;
  }
  return any;
}

bool Communicator::poll_records() {
  ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (remote == nullptr) return false;
  std::unique_lock<std::mutex> polling(poll_mutex_, std::try_to_lock);
  if (!polling) return false;
  return remote->poll([&](int process, const RecordHeader& header, const char* payload) {
    const bool announces = header.type == kArrive || header.type == kDetail;
    const bool known =
        !announces || (header.rank < spec_.world_size() && spec_.processes[header.rank] == process);
    if (!known) return;  // only a corrupted segment says such a thing
    handle_record(header, payload);
  });
}

void Communicator::handle_record(const RecordHeader& header, const char* payload) {
  std::vector<Finished> finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (broken_) return;
    const Key key{header.launch, header.call, header.copy, header.iteration};
    switch (header.type) {
      case kArrive: {
        note_launch(header.rank, header.launch);
        const Operation operation = find_or_add(key);
        operation->payloads[header.rank].assign(payload, payload + header.payload_bytes);
        mark_announced(operation, header.rank, header.signature);
        break;
      }
      case kOrder: {
        // The leader has seen all announcements and found them equal; some may still be on their
        // way here.
        const Operation operation = find_or_add(key);
        if (operation->ordered) return;
        operation->ordered = true;
        scheduled_.push_back(operation);
        start_if_ready(operation);
        break;
      }
      case kDetail:
        note_detail(header.rank, key, std::string(payload, header.payload_bytes));
        break;
      case kFailure: {
        if (header.payload_bytes == 0 || payload[0] < 0 || payload[0] >= kErrorKindCount) return;
        Error error;
        error.kind = static_cast<ErrorKind>(payload[0]);
        error.message.assign(payload + 1, header.payload_bytes - 1);
        fail_locked(error, false, &finished);
        break;
      }
      default:
        break;
    }
  }
  complete(std::move(finished));
}

// Ranks disagree about this operation. Each process tells where its ranks stand; with all of that
// known, or after a moment, everybody raises the same error. A process that knows of an earlier
// dispute wins, so that all explain the first divergence and not what follows from it. Called under
// mutex_.
void Communicator::start_mismatch(const Key& key) {
  if (mismatching_ && !(key < mismatched_)) return;
  if (!mismatching_) mismatch_deadline_ = Clock::now() + kDetailPatience;
  mismatching_ = true;
  mismatched_ = key;
  details_.clear();
  if (spans_processes()) tell_standing();
  news_.notify_all();
}

void Communicator::tell_standing() {
  for (int rank : local_ranks_) {
    RecordHeader header = header_of(mismatched_);
    header.type = kDetail;
    header.rank = static_cast<uint16_t>(rank);
    details_[rank] = standing_of(rank);
    post(header, details_[rank].substr(0, kLongestDetail));
  }
}

void Communicator::note_detail(int rank, const Key& key, std::string text) {
  start_mismatch(key);
  if (key == mismatched_) details_[rank] = std::move(text);
}

// What a rank of this process does instead of, or as, the operation in dispute, as others should
// read it.
std::string Communicator::standing_of(int rank) const {
  const PendingOperation* shown = nullptr;
  for (const auto& [key, operation] : table_) {
    if (!operation->tickets[rank] || operation->finished) continue;
    if (key == mismatched_) {
      shown = operation.get();
      break;
    }
    if (shown == nullptr || key < shown->key) shown = operation.get();
  }
  if (shown == nullptr) return "in no collective";
  const CallInfo& info = *shown->tickets[rank]->request.info;
  return (shown->key == mismatched_ ? "" : "in another call, ") + info.label() + " #" +
         std::to_string(shown->key.call) + " of launch " + std::to_string(shown->key.launch) +
         ": " + info.signature.text;
}

}  // namespace jaxring
