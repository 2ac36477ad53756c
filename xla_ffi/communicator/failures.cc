// Ending with an error: on every rank of this process, and told to the other processes.
#include <algorithm>

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/error_payload.h"
#include "xla_ffi/communicator/events.h"
#include "xla_ffi/communicator/forked.h"

namespace jaxring {
void Communicator::fail(Error error) {
  if (forked()) return;  // its records would overwrite the parent's in the ring that both map
  std::vector<Finished> finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_locked(std::move(error), true, &finished);
  }
  complete(std::move(finished));
}

// The communicator is broken from here on. Under mutex_.
void Communicator::fail_locked(Error error, bool tell_others, std::vector<Finished>* finished) {
  if (broken_) return;
  dissolve_meeting();
  broken_ = error;
  // Closing is no error, unless somebody still waited.
  if (!stopping_ || waits_here()) Events::instance().post({"error", error.text()});
  if (tell_others && spans_processes()) {
    RecordHeader header;
    header.type = kFailure;
    if (ShmTransport* remote = remote_.load(std::memory_order_acquire)) remote->raise_alarm();
    post(header, to_payload(error));
  }
  const OperationTable operations = table_;  // a copy: failing an operation removes it
  for (const auto& entry : operations) fail_operation(entry.second, error, finished);
  news_.notify_all();
}

// An error ends as much as others may be waiting for: the communicator, or in one process the
// launch.
void Communicator::fail_widely(uint32_t launch, const Error& error,
                               std::vector<Finished>* finished) {
  if (spans_processes()) {
    fail_locked(error, true, finished);
  } else {
    fail_launch(launch, error, finished);
  }
}

// One process: the other launches of the communicator are not concerned. Under mutex_.
void Communicator::fail_launch(uint32_t launch, const Error& error,
                               std::vector<Finished>* finished) {
  constexpr size_t kRememberedFailures = 64;
  dissolve_meeting();
  Events::instance().post({"error", error.text()});
  failed_launches_.emplace(launch, error);
  if (failed_launches_.size() > kRememberedFailures) {
    failed_launches_.erase(failed_launches_.begin());
  }
  const OperationTable operations = table_;
  for (const auto& [key, operation] : operations) {
    if (key.launch == launch) fail_operation(operation, error, finished);
  }
}

void Communicator::fail_operation(const Operation& operation, const Error& error,
                                  std::vector<Finished>* finished) {
  if (operation->finished) return;
  if (operation->execution) {
    operation->execution->retire();  // from here on nobody touches its buffers
    // Only the first of the schedule uses FIFOs. Slices that it leaves there would reach the next
    // one.
    if (!spans_processes() && !scheduled_.empty() && scheduled_.front() == operation) {
      in_process_.reset();
    }
    for (auto* queue : {&immediate_, &scheduled_}) {
      auto found = std::find(queue->begin(), queue->end(), operation);
      if (found == queue->end()) continue;
      queue->erase(found);
      started_.fetch_sub(1, std::memory_order_release);
    }
  }
  finished->push_back(take_tickets(operation, error));
}

// Ends the operation's tickets and forgets it. Under mutex_; the completions are called without.
Communicator::Finished Communicator::take_tickets(const Operation& operation,
                                                  const std::optional<Error>& error) {
  Finished finished;
  operation->finished = true;
  const Clock::time_point now = Clock::now();
  bool sleeper = false;
  for (int rank : local_ranks_) {
    const std::shared_ptr<Ticket>& ticket = operation->tickets[rank];
    if (!ticket) continue;
    --open_tickets_[rank];
    ticket->error = error;
    record_end(rank, operation->key,
               {operation->algorithm, operation->ready, now,
                error ? name_of(error->kind) : std::string_view("done"),
                error ? nullptr : operation->execution.get()});
    if (ticket->on_done) {
      --handed_over_;
      finished.completions.emplace_back(std::move(ticket->on_done), error);
    }
    if (ticket->finish()) {
      sleeper = true;
      futex_wake_all(&ticket->state, true);
    }
  }
  // Between processes a waiter sleeps where news of them comes in.
  ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (sleeper && remote != nullptr) remote->wake(spec_.self_process);
  const Key key = operation->key;  // the table may hold the last reference
  table_.erase(key);
  return finished;
}

void Communicator::complete(std::vector<Finished> finished) {
  for (Finished& one : finished) {
    for (auto& [completion, error] : one.completions) completion(std::move(error));
  }
}

}  // namespace jaxring
