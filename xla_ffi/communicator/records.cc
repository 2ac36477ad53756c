// What processes tell each other. A record is small; what it says is checked before it is believed.
#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/error_payload.h"
#include "xla_ffi/core/text.h"
#include "xla_ffi/host/wait.h"

namespace jaxring {
namespace {

// How long a process waits for the other ranks' signatures before it raises with those it has.
constexpr auto kDetailPatience = std::chrono::seconds(1);

// How long of that a rank that is late may take to come to the operation in dispute, before it is
// said to be elsewhere.
constexpr auto kLatePatience = std::chrono::milliseconds(500);

// A signature has a few characters for each leaf; a record must fit into the ring.
constexpr size_t kLongestDetail = 64 << 10;

}  // namespace

// Records keep their order: once one waits in the outbox, the next ones queue behind it.
void Communicator::post(const RecordHeader& header, const char* payload) {
  ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (remote != nullptr && outbox_.empty() && remote->try_post(header, payload)) return;
  // This rank's own operations may be done before others have heard of it, so somebody must see to
  // it.
  outbox_.emplace_back(header, std::string(payload, payload + header.payload_bytes));
  need_progress_thread();
}

void Communicator::post(RecordHeader header, const std::string& payload) {
  header.payload_bytes = static_cast<uint32_t>(payload.size());
  post(header, payload.data());
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
    const bool announces = header.type == kArrive || header.type == kDetail ||
                           header.type == kLeave || header.type == kWaits;
    const bool known =
        !announces || (header.rank < spec_.world_size() && spec_.processes[header.rank] == process);
    const bool leads = header.type != kOrder || process == spec_.processes[0];
    if (!known || !leads) return;  // only a corrupted segment says such a thing
    handle_record(header, payload);
  });
}

void Communicator::handle_record(const RecordHeader& header, const char* payload) {
  std::vector<Finished> finished;
  {
    const auto lock = spin_locked(mutex_);
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
        std::optional<Error> error = error_from_payload(payload, header.payload_bytes);
        if (!error) return;  // only a corrupted segment holds such a thing
        fail_locked(*error, false, &finished);
        break;
      }
      case kLeave:
        left_[header.rank] = true;
        news_.notify_all();
        break;
      case kWaits:
        note_waits(header.rank, key, payload, header.payload_bytes);
        break;
      default:
        break;
    }
    take_finished(&finished);
  }
  complete(std::move(finished));
}

// Ranks disagree about this operation. Each process tells where its ranks stand; with all of that
// known, or after a moment, everybody raises the same error. A process that knows of an earlier
// dispute wins, so that all explain the first divergence and not what follows from it. Called under
// mutex_.
void Communicator::start_mismatch(const Key& key) {
  if (mismatching_ && key == mismatched_) return tell_standing(false);
  if (mismatching_ && !(key < mismatched_)) return;
  if (!mismatching_) {
    late_deadline_ = Clock::now() + kLatePatience;
    mismatch_deadline_ = Clock::now() + kDetailPatience;
  }
  mismatching_ = true;
  mismatched_ = key;
  details_.clear();
  tell_standing(false);
  news_.notify_all();
}

// Once for each rank; a late one is given a moment to come to the operation in dispute.
void Communicator::tell_standing(bool also_late) {
  if (!spans_processes()) return;
  for (int rank : local_ranks_) {
    if (details_.count(rank) > 0 || (!also_late && may_still_come(rank))) continue;
    RecordHeader header = header_of(mismatched_);
    header.type = kDetail;
    header.rank = static_cast<uint16_t>(rank);
    details_[rank] = standing_of(rank);
    post(header, first_bytes(details_[rank], kLongestDetail));
  }
}

// Those who still wait for our ranks, or will, need not wait for their deadline. Under mutex_.
void Communicator::tell_leaving() {
  if (!all_attached() || !spans_processes() || broken_ || stopping_ || waits_here()) return;
  for (int rank : local_ranks_) {
    RecordHeader header;
    header.type = kLeave;
    header.rank = static_cast<uint16_t>(rank);
    post(header, nullptr);
  }
}

void Communicator::note_detail(int rank, const Key& key, std::string text) {
  start_mismatch(key);
  if (key == mismatched_) details_[rank] = std::move(text);
}

// What a rank of this process does instead of, or as, the operation in dispute; null: nothing.
const PendingOperation* Communicator::standing_in(int rank) const {
  const PendingOperation* oldest = nullptr;
  for (const auto& [key, operation] : table_) {
    if (!operation->tickets[rank] || operation->finished) continue;
    if (key == mismatched_) return operation.get();
    if (oldest == nullptr || key < oldest->key) oldest = operation.get();
  }
  return oldest;
}

// Whether the operation in dispute lies before a rank of this process: the one that it is in may be
// about to finish.
bool Communicator::may_still_come(int rank) const {
  const PendingOperation* now_in = standing_in(rank);
  if (now_in != nullptr) return now_in->key < mismatched_;
  return latest_launch_[rank].value_or(0) <= mismatched_.launch;
}

// As others should read it.
std::string Communicator::standing_of(int rank) const {
  const PendingOperation* shown = standing_in(rank);
  if (shown == nullptr) return "in no collective";
  const CallInfo& info = *shown->tickets[rank]->request.info;
  return (shown->key == mismatched_ ? "" : "in another call, ") + info.label() + " #" +
         std::to_string(shown->key.call) + " of launch " + std::to_string(shown->key.launch) +
         ": " + info.signature.text;
}

}  // namespace jaxring
