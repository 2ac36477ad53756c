// Counters of what really ran, from the engine, so that a user can see that gradients went through
// us.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "xla_ffi/algorithms/registry.h"

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

// What one communicator counts, cheap enough for every operation.
struct Counters {
  int64_t operations = 0;
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  double wait_s = 0;

  void count(int64_t sent, int64_t received, double waited_s) {
    ++operations;
    bytes_sent += sent;
    bytes_received += received;
    wait_s += waited_s;
  }
};

using CountersByCall = std::map<std::pair<Collective, Algorithm>, Counters>;

}  // namespace jaxring
