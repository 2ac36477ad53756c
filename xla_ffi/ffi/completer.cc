#include "xla_ffi/ffi/completer.h"

#include <unordered_map>

namespace jaxring {

Completer& Completer::of_device(int device_ordinal) {
  static std::mutex& mutex = *new std::mutex;
  static auto& completers = *new std::unordered_map<int, Completer*>;
  std::lock_guard<std::mutex> lock(mutex);
  Completer*& completer = completers[device_ordinal];
  if (completer == nullptr) completer = new Completer;
  return *completer;
}

Completer::Completer() : thread_([this] { run(); }) {}

void Completer::post(std::function<void()> task) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  posted_.notify_one();
}

void Completer::run() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      posted_.wait(lock, [&] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace jaxring
