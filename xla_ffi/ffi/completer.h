// Completing a future resumes the rest of its device's program on the completing thread, so each
// device has a thread of its own for that: completing two devices' futures from one thread runs the
// one's program before the other's, and deadlocks as soon as the first waits for the second (a psum
// behind our call).
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace jaxring {

class Completer {
 public:
  // The device's completer; lives as long as the process.
  static Completer& of_device(int device_ordinal);
  void post(std::function<void()> task);

 private:
  Completer();
  void run();

  std::mutex mutex_;
  std::condition_variable posted_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

}  // namespace jaxring
