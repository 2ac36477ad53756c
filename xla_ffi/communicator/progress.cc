// Doing the work: the arriving threads for a moment, then the progress thread.
#include <unistd.h>

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/forked.h"
#include "xla_ffi/host/wait.h"

namespace jaxring {
namespace {

// How long a sleeper sleeps at most before it looks at deadlines and at the peers' health.
constexpr auto kWatchInterval = std::chrono::milliseconds(50);

Error forked_error(const CallInfo& info) {
  Error error;
  error.kind = ErrorKind::kUsageError;
  error.call = info.label();
  error.message = error.call + ": process " + std::to_string(getpid()) +
                  " was forked from one that uses jaxring, and has neither its threads nor its "
                  "place among the ranks; start processes with spawn or forkserver";
  return error;
}

}  // namespace

// One pass: hear what others say, then work on what has started. True if anything moved. `rank` is
// the one that lends its thread, or -1.
bool Communicator::drive(int rank) {
  bool progressed = poll_records();
  while (started_.load(std::memory_order_acquire) > 0) {
    const Operation operation = next_to_work_on();
    if (!operation) break;
    const bool worked = operation->execution->work(rank);
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
  const auto lock = spin_locked(mutex_);
  if (!immediate_.empty()) return immediate_.front();
  if (!scheduled_.empty() && scheduled_.front()->execution) return scheduled_.front();
  return nullptr;
}

void Communicator::finish(const Operation& operation) {
  std::vector<Finished> finished;
  {
    const auto lock = spin_locked(mutex_);
    if (operation->finished) return;  // another worker was faster, or it has failed
    auto& queue = !immediate_.empty() && immediate_.front() == operation ? immediate_ : scheduled_;
    queue.pop_front();
    started_.fetch_sub(1, std::memory_order_release);
    finished.push_back(finish_locked(operation, nullptr));
  }
  complete(std::move(finished));
}

// Under mutex_. Its traffic is asked of the execution, unless it is known.
Communicator::Finished Communicator::finish_locked(const Operation& operation,
                                                   const std::vector<Traffic>* known) {
  const CallInfo& info = *operation->first_ticket()->request.info;
  Counters& counters = stats_[{info.collective, operation->algorithm}];
  for (int rank : local_ranks_) {
    const Traffic traffic = known ? (*known)[rank] : operation->execution->traffic(rank);
    const auto waited = operation->ready - operation->tickets[rank]->arrived;
    counters.count(traffic.bytes_sent, traffic.bytes_received,
                   std::chrono::duration<double>(waited).count());
  }
  return take_tickets(operation, std::nullopt);
}

// What has come to its end while the mutex was held. Under mutex_.
void Communicator::take_finished(std::vector<Finished>* finished) {
  for (Finished& one : finished_) finished->push_back(std::move(one));
  finished_.clear();
}

std::optional<std::optional<Error>> Communicator::submit(
    Request request, const std::function<Completion()>& make_completion) {
  if (forked()) return forked_error(*request.info);
  std::shared_ptr<Ticket> ticket;
  std::vector<Finished> finished;
  Key key;
  {
    std::unique_lock<std::mutex> lock = spin_locked(mutex_);
    key = key_of(request);
    if (std::optional<Error> error = check_arrival(request, key)) return error;
    // Before others hear of this rank: somebody must see to what finds no room in its ring.
    const bool alone = spans_processes() && !progress_thread_.joinable() && !need_progress_thread();
    if (alone) {
      fail_locked(no_thread_error(request, key), true, &finished);
    } else if (try_meeting(request, key, lock, &ticket)) {
      if (!ticket) return std::optional<Error>();
    } else {
      const Exchange exchange = try_exchange(request, key, lock);
      if (exchange == Exchange::kDone) return std::optional<Error>();
      if (broken_) return broken_;
      ticket = std::make_shared<Ticket>(std::move(request), Clock::now());
      arrive(ticket, key, exchange == Exchange::kAnnounced);
    }
    if (lock.owns_lock()) take_finished(&finished);
  }
  complete(std::move(finished));
  if (!ticket) return broken();
  wait_briefly(*ticket);
  finished.clear();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!ticket->done() && hand_over(*ticket, make_completion)) return std::nullopt;
    if (!ticket->done()) {
      fail_widely(key.launch, no_thread_error(ticket->request, key), &finished);
    }
  }
  complete(std::move(finished));
  return ticket->error;
}

// To the progress thread. Under mutex_. False: the system gives no thread.
bool Communicator::hand_over(Ticket& ticket, const std::function<Completion()>& make_completion) {
  if (!need_progress_thread()) return false;
  try {
    ticket.on_done = make_completion();  // which may need a thread too
  } catch (const std::system_error&) {
    return false;
  }
  ++handed_over_;
  if (ShmTransport* remote = remote_.load(std::memory_order_acquire)) {
    remote->wake(spec_.self_process);  // where the progress thread may sleep
  }
  return true;
}

// Under mutex_. False: the system gives no thread.
bool Communicator::need_progress_thread() {
  if (stopping_) return true;
  try {
    if (!progress_thread_.joinable()) progress_thread_ = std::thread([this] { progress_loop(); });
  } catch (const std::system_error&) {
    return false;
  }
  news_.notify_all();
  return true;
}

Error Communicator::no_thread_error(const Request& request, const Key& key) const {
  Error error = error_of_this_process(ErrorKind::kUsageError);
  error.rank = request.rank;
  error.call = request.info->label();
  error.sequence = key.launch;
  error.message = error.call + ": the system gives rank " + std::to_string(error.rank) + " (pid " +
                  std::to_string(error.pid) + " on " + error.host +
                  ") no thread; raise its limit (ulimit -u, or the container's limit of processes)";
  return error;
}

// Lends the arriving thread to the communicator while that is useful: it spins, then sleeps where
// it is at hand. Handing over instead costs two more threads their wake-ups. XLA has few threads,
// so never for long: the wait ends when its patience is at an end.
void Communicator::wait_briefly(Ticket& ticket) {
  Backoff backoff(spin_);
  constexpr Clock::time_point kNotYet{};
  Clock::time_point give_up = kNotYet;
  while (!ticket.done()) {
    if (drive(ticket.request.rank)) {
      backoff.reset();
      give_up = kNotYet;
      continue;
    }
    if (backoff.pause()) continue;
    const Clock::time_point now = Clock::now();
    if (give_up == kNotYet) give_up = now + patience_.time();
    if (now >= give_up) return patience_.was_in_vain();
    nap(ticket, std::chrono::duration_cast<std::chrono::microseconds>(give_up - now));
  }
  if (give_up != kNotYet) patience_.was_rewarded();
}

// Until the ticket is done, others need its thread, or `at_most` has passed.
void Communicator::nap(Ticket& ticket, std::chrono::microseconds at_most) {
  if (!ticket.fall_asleep()) return;
  if (ShmTransport* remote = remote_.load(std::memory_order_acquire)) {
    const uint32_t bell = remote->prepare_sleep();
    const bool news = drive(ticket.request.rank) || ticket.done() || started_.load() > 0;
    news ? remote->cancel_sleep() : remote->sleep(bell, at_most);
  } else {
    ticket.sleep(at_most);
  }
  ticket.awake();
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
    if (drive(-1)) {
      backoff.reset();
    } else if (!backoff.pause()) {
      sleep_until_news();
    }
    if (mismatching_ && !broken()) check_mismatch();
    if (Clock::now() >= next_watch) {
      // Before we judge: a process that was stopped for long finds there what the others have said.
      poll_records();
      check_interrupts();
      check_stalls();
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
  if (drive(-1)) return remote->cancel_sleep();
  remote->sleep(ticket, kWatchInterval);
}

}  // namespace jaxring
