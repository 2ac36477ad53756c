#include "xla_ffi/cuda_ffi/watchdog.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "xla_ffi/communicator/events.h"
#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/cuda_ffi/seats.h"

namespace jaxring::cuda {

Watchdog& Watchdog::instance() {
  static Watchdog& watchdog = *new Watchdog;
  return watchdog;
}

void Watchdog::start() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (thread_.joinable() || stopping_) return;
  thread_ = std::thread([this] { run(); });
}

void Watchdog::stop() {
  stopping_ = true;
  std::lock_guard<std::mutex> lock(mutex_);
  if (thread_.joinable()) thread_.join();
}

void Watchdog::run() {
  while (!stopping_) {
    look();
    std::this_thread::sleep_for(kPeriod);
  }
}

void Watchdog::look() {
  std::lock_guard<std::mutex> lock(look_mutex_);
  for (const std::shared_ptr<Seat>& seat : Seats::instance().all()) {
    if (seat->ready()) look_at_peers(*seat);
    if (std::optional<std::string> stall = seat->stall()) {
      Events::instance().post({"stall", *stall});
    }
    report(*seat);
  }
}

void Watchdog::look_at_peers(Seat& seat) {
  for (const Card& card : seat.cards()) {
    if (card.host != seat.card().host || card.pid == seat.card().pid) continue;
    if (!has_ended(card.pid)) continue;
    Error error;
    error.kind = ErrorKind::kPeerError;
    error.rank = card.rank;
    error.missing_ranks = {card.rank};
    error.host = card.host_name;
    error.pid = card.pid;
    error.message = "communicator " + seat.key() + ": the process of " + describe(card) +
                    " ended while rank " + std::to_string(seat.rank()) +
                    " still used the communicator; look at its output";
    seat.fail(error);
  }
}

// pidfds, not kill(pid, 0): that reports a zombie as alive.
bool Watchdog::has_ended(int64_t pid) {
  const auto known = pidfds_.find(pid);
  int fd = known != pidfds_.end() ? known->second : -1;
  if (fd == -2) return true;
  if (fd == -1) {
    fd = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
    if (fd < 0 && errno != ESRCH) return false;  // cannot be watched; the deadline remains
  }
  pollfd entry{fd, POLLIN, 0};
  if (fd >= 0 && poll(&entry, 1, 0) <= 0) {
    pidfds_[pid] = fd;
    return false;
  }
  if (fd >= 0) close(fd);
  pidfds_[pid] = -2;
  return true;
}

void Watchdog::report(Seat& seat) {
  const std::optional<Error> error = seat.failure();
  if (!error) return;
  // At the end of a job some process ends first; that is news only if a kernel waits for it.
  if (error->kind == ErrorKind::kPeerError && !seat.stopped()) return;
  if (!seat.first_report()) return;
  Registry::instance().remember(*error);
  Events::instance().post({"stall", error->text()});  // logged,
  Events::instance().post({"error", error->text()});  // and a reason for a flight record
}

}  // namespace jaxring::cuda
