// Ending with an error: on every rank of this process, and told to the other processes.
#include <algorithm>

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/settings.h"

namespace jaxring {
namespace {

std::string join(const std::vector<int>& ranks) {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
  return text;
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g s", value);
  return text;
}

// Where texts begin to differ from the first of them.
size_t first_difference(const std::map<std::string, std::vector<int>>& texts) {
  size_t first = std::string::npos;
  const std::string& reference = texts.begin()->first;
  for (const auto& entry : texts) {
    const std::string& text = entry.first;
    const size_t shorter = std::min(text.size(), reference.size());
    const auto ends = std::mismatch(text.begin(), text.begin() + shorter, reference.begin());
    const size_t at = ends.first - text.begin();
    if (text != reference) first = std::min(first, at);
  }
  return first;
}

// The beginning of a long text and what stands around `at`: a signature names every leaf.
std::string excerpt(const std::string& text, size_t at) {
  constexpr size_t kWhole = 320, kHead = 120, kBefore = 40, kWindow = 160;
  if (text.size() <= kWhole) return text;
  const size_t begin = at == std::string::npos || at < kHead + kBefore ? kHead : at - kBefore;
  std::string shortened = text.substr(0, kHead);
  if (begin > kHead) shortened += " … ";
  if (begin < text.size()) shortened += text.substr(begin, kWindow);
  return shortened + (begin + kWindow < text.size() ? " …" : "");
}

}  // namespace

void Communicator::fail(Error error) {
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
  broken_ = error;
  if (tell_others && spans_processes()) {
    RecordHeader header;
    header.type = kFailure;
    const std::string text = error.message.substr(0, 4096);
    post(header, std::string(1, static_cast<char>(error.kind)) + text);
  }
  const OperationTable operations = table_;  // a copy: failing an operation removes it
  for (const auto& entry : operations) fail_operation(entry.second, error, finished);
  news_.notify_all();
}

// One process: the other launches of the communicator are not concerned. Under mutex_.
void Communicator::fail_launch(uint32_t launch, const Error& error,
                               std::vector<Finished>* finished) {
  constexpr size_t kRememberedFailures = 64;
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
  for (int rank : local_ranks_) {
    const std::shared_ptr<Ticket>& ticket = operation->tickets[rank];
    if (!ticket) continue;
    --open_tickets_[rank];
    ticket->error = error;
    if (ticket->on_done) {
      --handed_over_;
      finished.completions.emplace_back(std::move(ticket->on_done), error);
    }
    // release: the waiter sees the outputs and the error
    ticket->done.store(true, std::memory_order_release);
  }
  const Key key = operation->key;  // the table may hold the last reference
  table_.erase(key);
  return finished;
}

void Communicator::complete(std::vector<Finished> finished) {
  for (Finished& one : finished) {
    for (auto& [completion, error] : one.completions) completion(std::move(error));
  }
}

std::string Communicator::describe_rank(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  const ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (!is_local(rank)) {
    if (remote == nullptr || !remote->attached(spec_.processes[rank])) {
      return text + " (process " + std::to_string(spec_.processes[rank]) +
             ", which has not joined the communicator)";
    }
    text += " (pid " + std::to_string(remote->pid_of(spec_.processes[rank])) + ")";
  }
  for (const auto& [key, operation] : table_) {
    if (!operation->announced[rank]) continue;
    return text + ", which waits in call #" + std::to_string(key.call) + " of launch " +
           std::to_string(key.launch);
  }
  if (!latest_launch_[rank]) return text + ", which has entered no collective yet";
  return text + ", last seen in launch " + std::to_string(*latest_launch_[rank]);
}

Error Communicator::not_attached_error(double waited_s) const {
  const ShmTransport* remote = remote_.load(std::memory_order_acquire);
  Error error;
  error.kind = ErrorKind::kTimeoutError;
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (is_local(rank) || (remote != nullptr && remote->attached(spec_.processes[rank]))) continue;
    error.missing_ranks.push_back(rank);
  }
  error.message = "communicator " + spec_.key + " was not complete after " + seconds(waited_s) +
                  ": rank " + join(error.missing_ranks) +
                  " has not joined; see whether its process started, or raise timeout_s";
  return error;
}

// A missing rank that waits in another call of the same launch is a mismatch, not a delay. Under
// mutex_.
Error Communicator::timeout_error(const PendingOperation& operation) const {
  const Request& request = operation.first_ticket()->request;
  Error error;
  error.kind = ErrorKind::kTimeoutError;
  error.call = request.info->label();
  error.sequence = operation.key.launch;
  error.missing_ranks = operation.missing_ranks();
  error.signatures.push_back(request.info->signature.text);
  std::string where = error.call + " (call #" + std::to_string(operation.key.call) + " of launch " +
                      std::to_string(operation.key.launch) + " on communicator " + spec_.key +
                      ", " + request.info->signature.text + ")";
  if (error.missing_ranks.empty()) {
    error.missing_ranks =
        operation.execution ? operation.execution->blocking_peers() : std::vector<int>{0};
    const std::string within = " did not finish within " + seconds(settings().timeout_s);
    if (error.missing_ranks.empty()) {
      error.message =
          where + within + ", though all ranks take part and data moves; raise timeout_s";
    } else {
      error.message = where + within + ": no progress from rank " + join(error.missing_ranks) +
                      "; is that process stopped or swapped out?";
    }
    return error;
  }
  for (int rank : error.missing_ranks) {
    for (const auto& [key, other] : table_) {
      if (key.launch == operation.key.launch && other->announced[rank]) {
        error.kind = ErrorKind::kMismatchError;
      }
    }
  }
  error.rank = error.missing_ranks.front();
  std::string who;
  for (int rank : error.missing_ranks) who += (who.empty() ? "" : "; ") + describe_rank(rank);
  if (error.kind == ErrorKind::kMismatchError) {
    error.message = where + " was not entered by all ranks: missing " + who +
                    "; ranks take different branches or run different programs";
  } else {
    error.message = where + " timed out after " + seconds(settings().timeout_s) + ": missing " +
                    who + "; see what these ranks are doing, or raise timeout_s if they are slow";
  }
  return error;
}

Error Communicator::mismatch_error() const {
  Error error;
  error.kind = ErrorKind::kMismatchError;
  // Ranks that say the same are named together.
  std::map<std::string, std::vector<int>> by_text;
  for (const auto& [rank, text] : details_) by_text[text].push_back(rank);
  const size_t difference = first_difference(by_text);
  std::string list;
  for (const auto& [whole, ranks] : by_text) {
    const std::string text = excerpt(whole, difference);
    error.signatures.push_back(text);
    list += std::string(list.empty() ? "" : "; ") + (ranks.size() > 1 ? "ranks " : "rank ") +
            join(ranks) + ": " + text;
  }
  error.message = "ranks of communicator " + spec_.key + " are not making the same call: " + list +
                  "; every rank must run the same sequence of collectives with the same shapes, "
                  "dtypes and ops";
  return error;
}

}  // namespace jaxring
