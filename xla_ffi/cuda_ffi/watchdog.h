// The thread that looks after the seats while nobody calls: it says in the log whom a kernel gave
// up on, and stops kernels that wait for a process that has ended, long before their deadline.
//
// It gives liveness, not instant errors: XLA learns of an error at the next Prepare, Initialize or
// Execute of a program that uses the communicator.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <thread>

#include "xla_ffi/cuda_ffi/seat.h"

namespace jaxring::cuda {

class Watchdog {
 public:
  // Never destroyed: see Seats.
  static Watchdog& instance();
  void start();  // once; later calls do nothing
  void stop();   // when the process ends

  // One round, for tests: what the thread does every kPeriod.
  void look();

 private:
  static constexpr auto kPeriod = std::chrono::milliseconds(50);

  void run();
  void look_at_peers(Seat& seat);
  void report(Seat& seat);
  bool has_ended(int64_t pid);

  std::mutex mutex_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex look_mutex_;
  std::map<int64_t, int> pidfds_;  // of other processes; -2 once ended
};

}  // namespace jaxring::cuda
