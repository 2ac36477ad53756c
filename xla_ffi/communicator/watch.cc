// What the progress thread looks after while somebody waits: Ctrl-C, stalls, deadlines, disputes
// and the peers' lives.
#include <cmath>

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/events.h"
#include "xla_ffi/communicator/interrupt.h"
#include "xla_ffi/communicator/settings.h"

namespace jaxring {

// Says once for each operation who is missing, long before its deadline.
void Communicator::check_stalls() {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto patience = std::chrono::duration<double>(settings().warn_s.load());
  const Clock::time_point now = Clock::now();
  for (const auto& [key, operation] : table_) {
    if (operation->warned || operation->ticket_count == 0 || operation->finished) continue;
    const auto waited = now - operation->first_ticket()->arrived;
    if (waited < patience) continue;
    operation->warned = true;
    const std::vector<int> missing = operation->missing_ranks();
    const std::string why = missing.empty() ? "all ranks have come, but it has not finished"
                                            : "missing " + describe_missing(missing);
    const double waited_s = std::chrono::duration<double>(waited).count();
    Events::instance().post({"stall", describe_call(*operation) + " has waited " +
                                          std::to_string(std::lround(waited_s)) + " s: " + why});
  }
}

// Ends what this rank waits for once a Ctrl-C has come; see interrupt.h.
void Communicator::check_interrupts() {
  std::vector<Finished> finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint32_t now = interrupts().load(std::memory_order_relaxed);
    for (const auto& [key, operation] : table_) {
      if (operation->ticket_count == 0) continue;
      if (!operation->watched && interrupt_handler_lost()) {
        Events::instance().post({"interrupts", ""});  // only Python knows whose the new one is
      }
      operation->watched = true;
      const std::shared_ptr<Ticket>& ticket = operation->first_ticket();
      if (ticket->interrupts_before == now) continue;
      Error error = error_of_this_process(ErrorKind::kAbortedError);
      error.rank = ticket->request.rank;
      error.call = ticket->request.info->label();
      error.sequence = key.launch;
      error.message = describe_call(*operation) + " was interrupted (SIGINT) on rank " +
                      std::to_string(error.rank);
      fail_widely(key.launch, error, &finished);
      break;  // the table has changed
    }
  }
  complete(std::move(finished));
}

void Communicator::check_deadlines() {
  std::vector<Finished> finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const Clock::time_point now = Clock::now();
    for (const auto& [key, operation] : table_) {
      if (roll_call_is_due(*operation, now)) tell_waits(*operation);
      const bool left = waits_for_one_that_left(*operation);
      if (operation->ticket_count == 0 || (now < operation->deadline && !left)) continue;
      const Error error = left ? left_error(*operation) : timeout_error(*operation);
      if (!left && spans_processes() && error.kind == ErrorKind::kMismatchError) {
        if (!mismatching_) start_mismatch(key);  // only the others know what they wait in
      } else {
        fail_widely(key.launch, error, &finished);
      }
      break;  // the table has changed
    }
  }
  complete(std::move(finished));
}

void Communicator::check_mismatch() {
  std::vector<Finished> finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!mismatching_ || broken_) return;
    if (!spans_processes()) {
      for (int rank : local_ranks_) details_[rank] = standing_of(rank);
    } else if (Clock::now() >= late_deadline_) {
      tell_standing(true);
    }
    const bool all_known = static_cast<int>(details_.size()) == spec_.world_size();
    if (!all_known && Clock::now() < mismatch_deadline_) return;
    const Error error = mismatch_error();
    fail_widely(mismatched_.launch, error, &finished);
    if (!spans_processes()) {
      mismatching_ = false;
      details_.clear();
    }
  }
  complete(std::move(finished));
}

// Called by the progress thread, so while somebody waits.
void Communicator::check_peers() {
  ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (remote == nullptr) return;
  if (const std::string why = remote->link_failure(); !why.empty()) return fail(links_error(why));
  // One that has closed the communicator had given its part in all of its operations.
  if (dead_process_ && has_left(*dead_process_)) dead_process_.reset();
  if (!dead_process_) {
    // What it said before it died still counts: its last operations may complete. Look again next
    // time.
    dead_process_ = remote->find_dead_process();
    return;
  }
  const int process = *dead_process_;
  Error error;
  error.kind = ErrorKind::kPeerError;
  error.pid = remote->pid_of(process);
  error.host = remote->is_here(process) ? host_name() : remote->host_of(process);
  std::string ranks, call;
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (spec_.processes[rank] != process) continue;
    if (error.rank < 0) error.rank = rank;
    error.missing_ranks.push_back(rank);
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const Operation operation = oldest_of_ours()) {
      error.call = operation->first_ticket()->request.info->label();
      error.sequence = operation->key.launch;
      call = " in " + error.call + " (call #" + std::to_string(operation->key.call) +
             " of launch " + std::to_string(operation->key.launch) + ")";
    }
  }
  // Of another host's process only the connection is known.
  const std::string fate = remote->is_here(process)
                               ? "has died"
                               : "has died, or the network has ended the connection to it,";
  error.message = "the process of rank " + ranks + " (pid " + std::to_string(error.pid) + " on " +
                  error.host + ") " + fate + " while other ranks of communicator " + spec_.key +
                  " waited for it" + call + "; look at that process's output, then restart the " +
                  "job or go on with a new communicator";
  fail(error);
}

}  // namespace jaxring
