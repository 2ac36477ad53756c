// How long a schedule takes on a machine of a given latency and bandwidth: each rank's steps, as
// the template gives them, on a clock.
//
// A message of b bytes costs its link latency_s + b * s_per_byte (Hockney's alpha and beta). Within
// a host the sending rank is busy meanwhile, as it copies; between hosts its host's network
// interface is, out and in, which all ranks of the host share. A received partial result costs
// reduce_s_per_byte. A message is one chunk: what pipelining within a chunk saves is left out, and
// FIFOs never are full.
#pragma once

#include <cstdint>

#include "xla_ffi/algorithms/registry.h"

namespace jaxring {

struct Link {
  double latency_s = 0;
  double s_per_byte = 0;
};

struct Machine {
  int ranks_per_host = 1;
  Link within;   // a host
  Link between;  // hosts
  double reduce_s_per_byte = 0;
};

struct SimulatedCall {
  Collective collective = Collective::kAllreduce;
  Algorithm algorithm = Algorithm::kRing;
  int world_size = 1;
  int64_t count = 0;  // elements of the message; see Work
  int64_t element_bytes = 4;
  int64_t wire_bytes = 4;  // of one element of a partial result
  int64_t chunk_elements = 64 << 10;
};

struct SimulatedRun {
  double time_s = 0;
  int64_t messages = 0;         // of all ranks
  int64_t rank_bytes_sent = 0;  // by the rank that sends most
  int64_t host_bytes_sent = 0;  // to other hosts, by the host that sends most
  int64_t steps = 0;            // of all ranks
};

// Throws std::runtime_error if ranks wait for each other in a circle, which would be a fault of the
// schedule.
SimulatedRun simulate(const SimulatedCall& call, const Machine& machine);

// The longest chain of messages, each of which waits for the one before: simulate() with a latency
// of one and nothing else.
int64_t hops_of(const SimulatedCall& call, int ranks_per_host = 1);

}  // namespace jaxring
