// How fast two cores of this machine hand a cache line to and fro: what small messages are made of,
// and what shows that a virtual machine is in its slow mode.
#pragma once

namespace jaxring {

// Nanoseconds of one round trip, the median of several short trials (some 10 ms in all); 0 where
// there is only one core. About 100 on one socket.
double cache_line_round_trip_ns();

}  // namespace jaxring
