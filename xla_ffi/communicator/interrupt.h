// Ctrl-C while a rank waits. Python's own handler runs only between bytecodes, so not while the
// main thread is inside XLA: a native handler counts the signal and calls Python's, and whoever
// waits for peers looks at the count, ends the wait with AbortedError, and so lets Python go on.
#pragma once

#include <atomic>
#include <cstdint>

namespace jaxring {

// How many SIGINTs have come since install_interrupt_handler().
std::atomic<uint32_t>& interrupts();

// Goes before the handler that is installed now. Calling it again does nothing.
void install_interrupt_handler();
// Whether SIGINT has another handler now: each signal.signal of Python's puts its own there.
bool interrupt_handler_lost();

// From here on the signal asks Python's monitor thread for a dump of the flight record (events.h),
// also while the main thread is inside XLA.
void install_dump_handler(int signal);

}  // namespace jaxring
