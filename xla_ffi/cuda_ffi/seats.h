// The seats of this process, and the two ways in which they come to be.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/cuda_ffi/seat.h"

namespace jaxring::cuda {

class Seats {
 public:
  // Never destroyed: XLA's threads may outlive static destruction.
  static Seats& instance();

  // With XLA's cliques: the seat of this device in the clique, set up at its first use, when all
  // ranks of the clique are here. Blocks; throws std::runtime_error or Failed.
  std::shared_ptr<Seat> of_clique(const std::string& key, NcclComm clique, int device);

  // Without: Python makes them while lowering, carries their cards to the other processes, and
  // brings back the answers. `ranks` and `devices` are those of this process.
  void create(const std::string& key, const std::vector<int>& ranks,
              const std::vector<int>& devices, int world_size);
  std::vector<Card> cards(const std::string& key);
  // By seat: whose memory it maps.
  std::vector<uint64_t> map(const std::string& key, const std::vector<Card>& cards);
  void decide(const std::string& key, const std::vector<uint64_t>& mapped);
  // The set-up has failed, or somebody has aborted; calls on the communicator raise it.
  void fail(const std::string& key, const Error& error);
  // "missing", "connecting", "ready" or "broken: …".
  std::string state(const std::string& key);
  void close(const std::string& key);
  // Forgets the seats of all cliques: each is made anew at its next Initialize, in the same clique.
  // All processes of a clique call it, with no kernel of theirs under way.
  void rejoin();
  // The seat of a rank, or of the only rank here (-1), once it is ready; waits for that at most
  // timeout_s. Throws std::runtime_error or Failed.
  std::shared_ptr<Seat> wait_for(const std::string& key, int rank);

  std::vector<std::shared_ptr<Seat>> all() const;
  // What kernels have done; what NCCL carries whole is not in it.
  std::vector<StatsRow> stats(bool reset);

 private:
  static std::vector<StatsRow> retire(const std::vector<std::shared_ptr<Seat>>& seats);
  std::vector<std::shared_ptr<Seat>> of_key(const std::string& key) const;

  mutable std::mutex mutex_;
  // XLA keeps its cliques as long as the process lives, so that an address names one.
  std::map<NcclComm, std::shared_ptr<Seat>> by_clique_;
  std::map<std::pair<std::string, int>, std::shared_ptr<Seat>> by_key_;  // and rank
  std::vector<StatsRow> closed_stats_;
  std::map<std::string, Error> failed_;  // set-ups that did not even come to seats
};

}  // namespace jaxring::cuda
