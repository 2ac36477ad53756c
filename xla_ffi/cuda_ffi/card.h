// What ranks tell each other when a communicator is set up, and what follows from it: pure
// functions, so that every rank comes to the same conclusion.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xla_ffi/cuda_ffi/runtime.h"

namespace jaxring::cuda {

// One rank's, as bytes of fixed size: it travels through NCCL or through the store.
struct Card {
  static constexpr uint32_t kFormat = 0x4A520001;

  uint32_t format = kFormat;
  int32_t rank = 0;
  uint64_t host = 0;  // equal on processes that see each other's pids and network
  int64_t pid = 0;
  int32_t device = 0;    // ordinal in its process
  int32_t exported = 0;  // whether `memory` means anything
  IpcHandle memory = {};
  uint64_t address = 0;  // of that memory in its process
  int64_t bytes = 0;     // of that memory
  char host_name[64] = {};
};

// How a communicator's ranks reach each other.
enum class Reach : uint8_t {
  kMapped,  // every rank maps every other's memory: our kernels
  kHosts,   // so within hosts; between them NCCL, each rank with its likes (rails)
  kNccl,    // NCCL as a whole
};

struct Plan {
  Reach reach = Reach::kNccl;
  std::string reason;  // why not kMapped
  // Of kHosts, for one rank: the ranks of its host, and the number of its rail.
  std::vector<int> host_ranks;
  int place_in_host = 0;
  int host_index = 0;
};

// `mapped[r]` says for rank r, as bits by rank, whose memory it maps (its own included).
Plan plan_for(int rank, const std::vector<Card>& cards, const std::vector<uint64_t>& mapped);

// A number for this host and its namespaces.
uint64_t host_identity();

// "rank 3 (pid 77 on host h, GPU 1)"
std::string describe(const Card& card);

}  // namespace jaxring::cuda
