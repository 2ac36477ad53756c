// One rank's place among hosts, and its exchange with the others of its host: what all schedules of
// two levels begin with.
#pragma once

#include <optional>
#include <vector>

#include "xla_ffi/algorithms/prims.h"
#include "xla_ffi/core/host_layout.h"

namespace jaxring {

template <class Prims>
class OnHost {
 private:
  std::optional<HostLayout> alone_;  // of one host, where nothing is known of several

 public:
  OnHost(Prims& p, World world)
      : prims(p),
        layout(world.hosts != nullptr ? *world.hosts
                                      : alone_.emplace(std::vector<int>(world.world_size, 0))),
        rank(world.rank),
        host(layout.host_of[rank]),
        mates(layout.ranks[host]) {}
  OnHost(const OnHost&) = delete;

  Prims& prims;
  const HostLayout& layout;
  const int rank;
  const int host;
  const std::vector<int>& mates;  // of this host, this rank too

  // f(peers) for the host's other ranks, all at once where their numbers follow one another.
  template <class F>
  void with_others(F&& f) const {
    if (mates.size() < 2) return;
    if (mates.back() - mates.front() + 1 == static_cast<int>(mates.size())) {
      return f(Peers::range_but(rank, mates.front(), mates.back() + 1));
    }
    for (int mate : mates) {
      if (mate != rank) f(Peers::one(mate));
    }
  }
  // Adds up what the others send; where the sum is then.
  Own reduce(Range range) const {
    Own own = Own::kInput;
    prims.keep_within(range);
    with_others([&](Peers others) {
      prims.recv_reduce_keep(others, range, own);
      own = Own::kKept;
    });
    return own;
  }
  // Gives the others what has been written to the output.
  void share(Range range) const {
    with_others([&](Peers others) { prims.send_final(others, range, Own::kOutput); });
  }
  // What comes from a peer, or from nobody: the input, goes to the output and to the others.
  void spread(Peers from, Range range) const {
    const Own own = from.count() == 0 ? Own::kInput : Own::kNothing;
    bool written = false;
    with_others([&](Peers others) {
      if (written) return prims.send_final(others, range, Own::kOutput);
      prims.step(from, others, range, own, Into::kOutput);
      written = true;
    });
    if (!written) prims.step(from, Peers::none(), range, own, Into::kOutput);
  }
};

}  // namespace jaxring
