// One rank's place in a communicator of GPUs: its arena, the others' as mapped here, and what its
// kernels and the host tell each other. Made once, before any call; Execute only reads it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/communicator/stats.h"
#include "xla_ffi/core/error.h"
#include "xla_ffi/cuda_ffi/card.h"
#include "xla_ffi/cuda_ffi/multicast.h"
#include "xla_ffi/cuda_ffi/nccl.h"
#include "xla_ffi/cuda_ffi/runtime.h"

namespace jaxring::cuda {

using SetUpClock = std::chrono::steady_clock;

// What is called, for those who ask afterwards. Kernels know only its number.
struct Site {
  std::string collective;
  std::string signature;
  std::string label;  // "allreduce 'grads'"
  std::string name;   // the user's
  Traffic traffic;
};

// The last call that a kernel of a seat has begun.
struct LastCall {
  uint64_t number = 0;  // of the seat's calls, from 0
  Site site;
  std::string outcome;  // "done", the kind of error, or "" while it is under way
};

class Seat {
 public:
  // Loads the kernels on the device and allocates. Throws std::runtime_error.
  Seat(std::string key, int rank, int world_size, int device);
  ~Seat();
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

  const std::string& key() const { return key_; }
  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int device() const { return device_; }
  const Card& card() const { return card_; }
  const std::vector<Card>& cards() const { return cards_; }
  const Plan& plan() const { return plan_; }
  NcclComm clique() const { return clique_; }
  std::string transport() const;

  // Set-up, in this order. ----------------------------------------------------------------------
  // Maps what can be mapped of the others' arenas, and says whose, as bits by rank.
  uint64_t map(std::vector<Card> cards);
  // From everybody's answers; `clique` is null where there is no NCCL. Throws std::runtime_error
  // where ranks that NCCL would have to connect have none.
  void decide(const std::vector<uint64_t>& mapped, const Nccl* nccl, NcclComm clique);
  // Once decided: sums by NVLink's switches, where all ranks can. All ranks call it together.
  void join_multicast(const Multicast::Gather& gather);
  const Multicast& multicast() const { return multicast_; }
  bool ready() const { return ready_.load(std::memory_order_acquire); }

  // Shares one short text with all ranks, once ready. Blocks until all have given theirs, in the
  // same order of calls. Throws Failed.
  std::vector<std::string> all_gather(const std::string& text);

  // A call. --------------------------------------------------------------------------------------
  bool serves(const KernelCall& call, std::string* why_not) const;
  // The call's number in its arena's log, the same for all calls that look alike.
  int site_of(const Site& site);
  Traffic traffic_of(const KernelCall& call) const;
  // Enqueues; neither allocates nor waits.
  Failure run(const KernelCall& call, Stream stream) const;

  // Failure. -------------------------------------------------------------------------------------
  // What broke it, if anything did; looks at the kernels' status word too.
  std::optional<Error> failure();
  // Whether a kernel gave up waiting.
  bool stopped() const;
  // True once: its failure is to be told to an operator.
  bool first_report() { return !reported_.exchange(true); }
  // Keeps the first error, and stops kernels that wait.
  void fail(Error error);
  // Its communicator is closed: nothing about it is news any more.
  void retire() { retired_.store(true, std::memory_order_release); }
  bool retired() const { return retired_.load(std::memory_order_acquire); }

  // What has happened (seat_log.cc); copies from the device, so not for Execute. -----------------
  std::vector<StatsRow> stats(bool reset);  // `wait_s` is not measured
  std::optional<LastCall> last_call();
  // Once for each wait that has taken longer than the setting warn_s: who waits for whom.
  std::optional<std::string> stall();

 private:
  friend class SeatExchange;
  struct HostWords;  // pinned: kernels write, the host reads, and the other way round

  Failure run_across_hosts(const KernelCall& call, Stream stream) const;
  DeviceWorld world() const;
  void allocate();
  void release();
  void* mapping_of(const Card& card);
  Error stopped_error(uint64_t status) const;
  // Kernels count within their world, which across hosts is that of this host.
  int rank_of_peer(int peer) const;
  Site site(int number) const;
  std::optional<CallLog> log() const;  // nothing if the device does not answer

  const std::string key_;
  const int rank_, world_size_, device_;
  int64_t arena_bytes_ = 0;
  void* memory_ = nullptr;  // the arena, then the board of SeatExchange
  HostWords* words_ = nullptr;
  HostWords* words_on_device_ = nullptr;
  Stream stream_ = nullptr;      // for set-up; never that of the calls
  Stream log_stream_ = nullptr;  // for the log, as set-up may wait for long
  Card card_;
  std::vector<Card> cards_;
  std::vector<char*> arenas_;    // by rank; null where not mapped
  std::vector<void*> imported_;  // to be closed
  Plan plan_;
  DeviceWorld world_;  // of all ranks, or (kHosts) of this host's
  const Nccl* nccl_ = nullptr;
  NcclComm clique_ = nullptr;  // XLA's; not ours to destroy
  NcclComm rail_ = nullptr;    // of the ranks with our place in the other hosts
  Multicast multicast_;
  std::atomic<bool> ready_{false};
  uint64_t gathered_ = 0;
  std::mutex gather_mutex_;
  mutable std::mutex log_mutex_;
  std::vector<Site> sites_{1};  // number 0: a part of another call
  CallLog counted_{};           // at the last reset
  std::atomic<bool> failed_{false};
  std::atomic<bool> retired_{false};
  std::atomic<bool> reported_{false};
  std::mutex failure_mutex_;
  std::optional<Error> failure_;
};

// How an Error leaves a function that has something else to return.
struct Failed {
  Error error;
};

}  // namespace jaxring::cuda
