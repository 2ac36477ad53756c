#include "xla_ffi/communicator/forked.h"

#include <pthread.h>

#include <atomic>
#include <mutex>

namespace jaxring {
namespace {

std::atomic<bool> is_child{false};

}  // namespace

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { is_child.store(true, std::memory_order_relaxed); });
  });
}

bool forked() { return is_child.load(std::memory_order_relaxed); }

}  // namespace jaxring
