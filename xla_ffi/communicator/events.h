// What an operator should hear while nothing has failed yet, or when something has: the core prints
// nothing, so it queues these for Python's monitor thread, which logs and dumps.
#pragma once

#include <semaphore.h>
#include <time.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

namespace jaxring {

struct Event {
  std::string kind;  // "stall", "note", "error", "dump", "interrupts" (see interrupt.h) or "stop"
  std::string text;
};

class Events {
 public:
  // Never destroyed: see Registry.
  static Events& instance() {
    static Events& events = *new Events;
    return events;
  }

  void post(Event event) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.size() == kMostQueued) return;  // nobody listens
    queue_.push_back(std::move(event));
    sem_post(&posted_);
  }

  // May be called in a signal handler, hence the semaphore instead of a condition variable.
  void request_dump() {
    dump_requested_.store(true, std::memory_order_release);
    sem_post(&posted_);
  }

  // The listener should end; what comes later stays in the queue.
  void stop() {
    stopped_.store(true, std::memory_order_release);
    sem_post(&posted_);
  }

  std::optional<Event> next(double at_most_s) {
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);  // what sem_timedwait measures by
    const double nanoseconds = std::fmod(at_most_s, 1.0) * 1e9 + static_cast<double>(until.tv_nsec);
    until.tv_sec += static_cast<time_t>(at_most_s) + static_cast<time_t>(nanoseconds / 1e9);
    until.tv_nsec = static_cast<long>(std::fmod(nanoseconds, 1e9));
    while (sem_timedwait(&posted_, &until) != 0) {
      if (errno != EINTR) return std::nullopt;
    }
    if (dump_requested_.exchange(false, std::memory_order_acq_rel)) return Event{"dump", ""};
    std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.empty() && stopped_.load(std::memory_order_acquire)) return Event{"stop", ""};
    if (queue_.empty()) return std::nullopt;
    Event event = std::move(queue_.front());
    queue_.pop_front();
    return event;
  }

 private:
  static constexpr size_t kMostQueued = 100;
  Events() { sem_init(&posted_, 0, 0); }

  std::mutex mutex_;
  sem_t posted_;
  std::atomic<bool> dump_requested_{false};
  std::atomic<bool> stopped_{false};
  std::deque<Event> queue_;
};

}  // namespace jaxring
