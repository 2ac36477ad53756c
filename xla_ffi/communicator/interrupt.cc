#include "xla_ffi/communicator/interrupt.h"

#include <signal.h>

#include <mutex>

#include "xla_ffi/communicator/events.h"

namespace jaxring {
namespace {

struct sigaction previous;

// Async-signal-safe: a lock-free counter and the handler that was there before.
void on_interrupt(int signal, siginfo_t* info, void* context) {
  interrupts().fetch_add(1, std::memory_order_relaxed);
  if (previous.sa_flags & SA_SIGINFO) {
    previous.sa_sigaction(signal, info, context);
  } else if (previous.sa_handler != SIG_IGN && previous.sa_handler != SIG_DFL) {
    previous.sa_handler(signal);
  }
}

}  // namespace

std::atomic<uint32_t>& interrupts() {
  static std::atomic<uint32_t> count{0};
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  return count;
}

void install_interrupt_handler() {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  interrupts();  // its static is made here, not in the handler
  if (!interrupt_handler_lost() || sigaction(SIGINT, nullptr, &previous) != 0) return;
  // Where SIGINT ends the process, it should go on doing that.
  const bool simple = (previous.sa_flags & SA_SIGINFO) == 0;
  if (simple && (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN)) return;
  struct sigaction action{};
  action.sa_sigaction = on_interrupt;
  action.sa_flags = SA_SIGINFO | (previous.sa_flags & SA_RESTART) | SA_ONSTACK;
  action.sa_mask = previous.sa_mask;
  sigaction(SIGINT, &action, nullptr);
}

bool interrupt_handler_lost() {
  struct sigaction now{};
  if (sigaction(SIGINT, nullptr, &now) != 0) return false;
  return (now.sa_flags & SA_SIGINFO) == 0 || now.sa_sigaction != on_interrupt;
}

void install_dump_handler(int signal) {
  Events::instance();  // likewise
  struct sigaction action{};
  action.sa_handler = [](int) { Events::instance().request_dump(); };
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigaction(signal, &action, nullptr);
}

}  // namespace jaxring
