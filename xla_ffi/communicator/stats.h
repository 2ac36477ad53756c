// Counters of what really ran, from the engine, so that a user can see that gradients went through
// us.
#pragma once

#include <cstdint>
#include <string>

namespace jaxring {

struct StatsRow {
  std::string collective;
  std::string algorithm;
  std::string transport;
  std::string communicator;
  int64_t operations = 0;  // one per rank of this process
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  double wait_s = 0;  // from a rank's arrival until the last rank's
};

}  // namespace jaxring
