// Doing the work and watching the clock: the arriving threads for a moment, then the progress
// thread.
#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/host/wait.h"

namespace jaxring {
namespace {

// How long a sleeper sleeps at most before it looks at deadlines and at the peers' health.
constexpr auto kWatchInterval = std::chrono::milliseconds(50);

}  // namespace

// One pass: hear what others say, then work on what has started. True if anything moved.
bool Communicator::drive() {
  bool progressed = poll_records();
  while (started_.load(std::memory_order_acquire) > 0) {
    const Operation operation = next_to_work_on();
    if (!operation) break;
    const bool worked = operation->execution->work();
    progressed |= worked;
    if (operation->execution->finished()) {
      finish(operation);
    } else if (!worked) {
      break;
    }
  }
  return progressed;
}

Communicator::Operation Communicator::next_to_work_on() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!immediate_.empty()) return immediate_.front();
  if (!scheduled_.empty() && scheduled_.front()->execution) return scheduled_.front();
  return nullptr;
}

void Communicator::finish(const Operation& operation) {
  std::vector<Finished> finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (operation->finished) return;  // another worker was faster, or it has failed
    auto& queue = !immediate_.empty() && immediate_.front() == operation ? immediate_ : scheduled_;
    queue.pop_front();
    started_.fetch_sub(1, std::memory_order_release);
    const std::string algorithm(info_of(operation->algorithm).name);
    for (int rank : local_ranks_) {
      const Ticket& ticket = *operation->tickets[rank];
      StatsRow& row = stats_[{name_of(ticket.request.info->collective), algorithm}];
      const Traffic traffic = operation->execution->traffic(rank);
      ++row.operations;
      row.bytes_sent += traffic.bytes_sent;
      row.bytes_received += traffic.bytes_received;
      row.wait_s += std::chrono::duration<double>(operation->ready - ticket.arrived).count();
    }
    finished.push_back(take_tickets(operation, std::nullopt));
  }
  complete(std::move(finished));
}

std::optional<std::optional<Error>> Communicator::submit(
    Request request, const std::function<Completion()>& make_completion) {
  const auto ticket = std::make_shared<Ticket>(std::move(request));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::optional<Error> error = arrive(ticket)) return error;
  }
  wait_briefly(*ticket);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ticket->done.load(std::memory_order_acquire)) {
      ticket->on_done = make_completion();
      ++handed_over_;
      need_progress_thread();
      if (ShmTransport* remote = remote_.load(std::memory_order_acquire)) {
        remote->wake(spec_.self_process);  // where the progress thread may sleep
      }
      return std::nullopt;
    }
  }
  return ticket->error;
}

// Under mutex_.
void Communicator::need_progress_thread() {
  if (stopping_) return;
  if (!progress_thread_.joinable()) progress_thread_ = std::thread([this] { progress_loop(); });
  news_.notify_all();
}

// Lends the arriving thread to the communicator while that is useful. XLA has few threads, so never
// for long: the wait ends when nothing has moved for some pauses and yields.
void Communicator::wait_briefly(const Ticket& ticket) {
  Backoff backoff;
  while (!ticket.done.load(std::memory_order_acquire)) {
    if (drive()) {
      backoff.reset();
    } else if (!backoff.pause()) {
      return;
    }
  }
}

void Communicator::progress_loop() {
  Backoff backoff;
  Clock::time_point next_watch = Clock::now() + kWatchInterval;
  for (;;) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      news_.wait(lock, [&] { return stopping_ || handed_over_ > 0 || !outbox_.empty(); });
      if (stopping_) return;
      if (flush_outbox()) backoff.reset();
    }
    if (drive()) {
      backoff.reset();
    } else if (!backoff.pause()) {
      sleep_until_news();
    }
    if (mismatching_ && !broken()) check_mismatch();
    if (Clock::now() >= next_watch) {
      check_deadlines();
      check_peers();
      next_watch = Clock::now() + kWatchInterval;
    }
  }
}

void Communicator::sleep_until_news() {
  ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (remote == nullptr) {
    std::unique_lock<std::mutex> lock(mutex_);
    news_.wait_for(lock, kWatchInterval, [&] {
      return stopping_ || mismatching_ || started_.load(std::memory_order_acquire) > 0 ||
             remote_.load(std::memory_order_acquire) != nullptr;
    });
    return;
  }
  const uint32_t ticket = remote->prepare_sleep();
  if (drive()) return remote->cancel_sleep();
  remote->sleep(ticket, kWatchInterval);
}

void Communicator::check_deadlines() {
  std::vector<Finished> finished;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const Clock::time_point now = Clock::now();
    for (const auto& [key, operation] : table_) {
      if (operation->ticket_count == 0 || now < operation->deadline) continue;
      const Error error = timeout_error(*operation);
      if (spans_processes()) {
        fail_locked(error, true, &finished);
      } else {
        fail_launch(key.launch, error, &finished);
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
    }
    const bool all_known = static_cast<int>(details_.size()) == spec_.world_size();
    if (!all_known && Clock::now() < mismatch_deadline_) return;
    const Error error = mismatch_error();
    if (spans_processes()) {
      fail_locked(error, true, &finished);
    } else {
      fail_launch(mismatched_.launch, error, &finished);
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
  std::string ranks;
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (spec_.processes[rank] != process) continue;
    if (error.rank < 0) error.rank = rank;
    error.missing_ranks.push_back(rank);
    ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  }
  error.message = "the process of rank " + ranks + " (pid " + std::to_string(error.pid) +
                  ") has died while other ranks of communicator " + spec_.key +
                  " waited for it; look at that process's output, then restart the job or go on "
                  "with a new communicator";
  fail(error);
}

}  // namespace jaxring
