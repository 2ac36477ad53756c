// The CUDA kernels as a communicator sees them: plain C++, raw pointers, no CUDA headers. The same
// functions serve NCCL-registered memory, CUDA IPC, several GPUs in one process and many ranks on
// one GPU, since a kernel is told only where each rank's arena is mapped.
//
// Every rank launches the same call (but for its pointers) in the same order on one stream: what a
// kernel needs to know of earlier calls (epochs, FIFO positions) stands in the arena, so that a
// captured graph can be replayed.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "xla_ffi/algorithms/registry.h"
#include "xla_ffi/core/dtype.h"
#include "xla_ffi/core/operation.h"
#include "xla_ffi/core/reduce_op.h"

struct CUstream_st;  // cudaStream_t is a pointer to it

namespace jaxring::cuda {

inline constexpr int kMaxRanks = 32;

// A communicator as one rank's kernels see it. All pointers are valid on the launching device.
struct DeviceWorld {
  int rank = 0;
  int world_size = 1;
  char* arenas[kMaxRanks] = {};     // by rank, arena_bytes() each and 256-byte aligned
  uint64_t* status = nullptr;       // pinned host word of this rank's own: 0, or the first
                                    // wait_status(site, peer) that failed; the host only reads it
  uint64_t* stalled = nullptr;      // pinned host word: the last that took longer than warn_ns; the
                                    // host zeroes it once it has told
  const uint64_t* abort = nullptr;  // pinned host word: nonzero means stop waiting
  uint64_t timeout_ns = 0;          // of each wait for a peer
  uint64_t warn_ns = 0;             // 0: never
  // Of calls with `multimem`: window_bytes() of this rank's, and the address at which all ranks'
  // are one multicast object.
  char* window = nullptr;
  char* multicast = nullptr;
};

// In a status word: a call of `site` waits for `peer`, or gave up at the deadline or an abort.
JR_HOST_DEVICE constexpr uint64_t wait_status(int site, int peer) {
  return uint64_t{1} << 63 | static_cast<uint64_t>(site & 0x7fffffff) << 32 |
         static_cast<uint32_t>(peer);
}
JR_HOST_DEVICE constexpr int site_in(uint64_t status) {
  return static_cast<int>(status >> 32 & 0x7fffffff);
}
JR_HOST_DEVICE constexpr int peer_in(uint64_t status) {
  return static_cast<int>(status & 0xffffffff);
}

// What a rank's arena holds of its calls, at byte kLogOffset; the host copies it. Kernels count and
// not the host, as a captured graph is replayed without it.
inline constexpr int kMostSites = 256;
inline constexpr int64_t kLogOffset = 256;
struct CallLog {
  uint64_t begun;  // calls that a kernel began, and their last site
  uint64_t site;
  uint64_t ended;                 // those that came to their end, without a failure
  uint64_t ended_at[kMostSites];  // the same, by site
};

// How the direct algorithm moves a message. Summing in rank order, the first three give the same
// bits.
enum class Method : uint8_t {
  kBySize,
  kPackets,   // one-shot push: data and flag in one store; small messages only
  kOneShot,   // everyone stages its operand, then reads all it needs of every peer
  kTwoShot,   // allreduce only: reduce-scatter, then all-gather, through the arena
  kMultimem,  // the same with sums made by NVLink's switches, in an order of their own
};

// One rank's part of a collective call.
struct KernelCall {
  Collective collective = Collective::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  Algorithm algorithm = Algorithm::kAuto;
  Method method = Method::kBySize;   // of Algorithm::kDirect
  bool deterministic = true;         // keeps kAuto to rank-order sums
  int root = 0;                      // of a broadcast or reduce
  int destinations[kMaxRanks] = {};  // of a ppermute, by rank: where it sends to, -1 for nowhere
  int max_blocks = 0;                // 0: as many as the message wants; all ranks say the same
  int site = 0;                      // the caller's number of what is called, below kMostSites
  bool multimem = false;             // every rank has a window, so that kAuto may use kMultimem
  int64_t count = 0;                 // elements of one rank's operand
  const void* input = nullptr;       // `count` elements, aligned to the element
  void* output = nullptr;            // count, * world_size (all_gather) or / world_size
                                     // (reduce_scatter) elements; may be `input` if of its size,
                                     // and an all_gather's input may be its own block there
};

// Bytes of one rank's arena, whatever is called. Its owner zeroes it once, before any rank
// launches; after a failed call it must be zeroed on all ranks before it is used again.
int64_t arena_bytes(int world_size);
int64_t window_bytes();

// Whether launch() can run the call, the same on all ranks; if not, `why_not` (unless null) is a
// sentence that says why.
bool serves(const KernelCall& call, int world_size, std::string* why_not);

// Loads every kernel on the current device and checks that a full grid of each is co-resident. To
// be called on each device before any rank launches: lazy loading synchronises with the device and
// would wait for a kernel that waits for us. Returns the text of an error.
std::optional<std::string> load_all();

// How launch() will run the call, and what crosses this rank's links for it.
struct Traffic {
  const char* algorithm = "";
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
};
Traffic traffic_of(const KernelCall& call, int rank, int world_size);

// Enqueues the call on `stream` of the current device; neither allocates nor synchronises. Returns
// the text of an error: of CUDA, or why serves() is false. After a failed wait the output is not
// whole (its float parts are NaN), *world.status says whom the rank waited for, and later calls
// return NaN at once.
std::optional<std::string> launch(const DeviceWorld& world, const KernelCall& call,
                                  CUstream_st* stream);

// The same for `ranks` ranks that share the current device, by one cooperative launch, so that all
// are co-resident: for checks on a machine with one GPU. worlds[r] and calls[r] belong to rank r.
std::optional<std::string> launch_all_ranks(const DeviceWorld* worlds, const KernelCall* calls,
                                            int ranks, CUstream_st* stream);

}  // namespace jaxring::cuda
