// What errors say: who is missing and what it last did, which call, what was expected and what
// came.
#include <algorithm>

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/core/text.h"

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

std::string rounded_seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
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
  const size_t head = character_boundary(text, kHead);
  const bool early = at == std::string::npos || at < kHead + kBefore;
  const size_t begin = early ? head : character_boundary(text, at - kBefore);
  const size_t end = character_boundary(text, begin + kWindow);
  return text.substr(0, head) + (begin > head ? " … " : "") + text.substr(begin, end - begin) +
         (end < text.size() ? " …" : "");
}

}  // namespace

std::string Communicator::describe_rank(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  const ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (!is_local(rank)) {
    if (remote == nullptr || !remote->attached(spec_.processes[rank])) {
      return text + " (process " + std::to_string(spec_.processes[rank]) +
             ", which has not joined the communicator)";
    }
    const int process = spec_.processes[rank];
    const std::string host = remote->host_of(process);
    text += " (pid " + std::to_string(remote->pid_of(process)) +
            (host.empty() ? ")" : " on " + host + ")");
  }
  for (const auto& [key, operation] : table_) {
    if (!operation->announced[rank]) continue;
    text += ", which waits in call #" + std::to_string(key.call) + " of launch " +
            std::to_string(key.launch);
    const CallInfo* info = operation->info_of(rank);
    return info == nullptr ? text : text + ", " + info->label() + ": " + info->signature.text;
  }
  if (!latest_launch_[rank]) return text + ", which has entered no collective yet";
  // All ranks took part in what one of ours has finished.
  const FlightEntry* done = flight_.last_done(local_ranks_.front());
  if (done == nullptr)
    return text + ", last seen in launch " + std::to_string(*latest_launch_[rank]);
  const double ago_s = std::chrono::duration<double>(Clock::now() - done->finished).count();
  return text + ", which last finished " + done->info->label() + " (call #" +
         std::to_string(done->key.call) + " of launch " + std::to_string(done->key.launch) + ") " +
         rounded_seconds(ago_s) + " ago";
}

std::string Communicator::describe_missing(const std::vector<int>& ranks) const {
  std::string text;
  for (int rank : ranks) text += (text.empty() ? "" : "; ") + describe_rank(rank);
  return text;
}

// "allreduce 'x' (call #0 of launch 3 on communicator world, allreduce(sum, float32[4], …))"
std::string Communicator::describe_call(const PendingOperation& operation) const {
  const CallInfo& info = *operation.first_ticket()->request.info;
  return info.label() + " (call #" + std::to_string(operation.key.call) + " of launch " +
         std::to_string(operation.key.launch) + " on communicator " + spec_.key + ", " +
         info.signature.text + ")";
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

bool Communicator::waits_for_one_that_left(const PendingOperation& operation) const {
  for (int rank : operation.missing_ranks()) {
    if (left_[rank]) return true;
  }
  return false;
}

// One rank has made fewer calls than this one. Under mutex_.
Error Communicator::links_error(const std::string& why) const {
  Error error = error_of_this_process(ErrorKind::kAbortedError);
  error.message = "the connections of rank " + std::to_string(error.rank) + " (pid " +
                  std::to_string(error.pid) + " on " + error.host +
                  ") to other hosts have failed there (" + why +
                  "): is the process out of memory?; restart the job or go on with a new "
                  "communicator";
  return error;
}

Error Communicator::left_error(const PendingOperation& operation) const {
  const CallInfo& info = *operation.first_ticket()->request.info;
  Error error;
  error.kind = ErrorKind::kMismatchError;
  error.call = info.label();
  error.sequence = operation.key.launch;
  for (int rank : operation.missing_ranks()) {
    if (left_[rank]) error.missing_ranks.push_back(rank);
  }
  error.rank = error.missing_ranks.front();
  const std::optional<uint32_t> last = latest_launch_[error.rank];
  const std::string leaver = "has closed communicator " + spec_.key + " after " +
                             (last ? "launch " + std::to_string(*last) : "no launch");
  error.signatures = {info.signature.text, leaver};
  error.message = describe_call(operation) + " waits for rank " + join(error.missing_ranks) +
                  ", which " + leaver +
                  "; ranks made different numbers of calls (has one a batch fewer?), give all the "
                  "same";
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
  const std::string where = describe_call(operation);
  if (error.missing_ranks.empty()) {
    error.missing_ranks = operation.execution ? holding_up(operation) : std::vector<int>{0};
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
      if (key.launch != operation.key.launch || !other->announced[rank]) continue;
      error.kind = ErrorKind::kMismatchError;
      if (const CallInfo* info = other->info_of(rank)) {
        error.signatures.push_back(info->signature.text);
      }
    }
  }
  error.rank = error.missing_ranks.front();
  const std::string who = describe_missing(error.missing_ranks);
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
