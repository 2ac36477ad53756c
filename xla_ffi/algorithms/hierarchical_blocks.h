// all_gather and reduce_scatter on two levels: each rank's block crosses to each other host once,
// as a sum of that host's operands or for all of its ranks.
//
//   host 0         host 1       all_gather: rank 0 gives its block to rank 1 and to rank 2, its
//   rank 0  1      rank 2  3    deputy on host 1, which gives it to rank 3
//        0 -------> 2           reduce_scatter: rank 2 adds to its own part of rank 0's block that
//           1 -------> 3        of rank 3 and gives rank 0 the sum
//
// All ranks of a host share its traffic, as each is the deputy of others. Over h hosts of q ranks
// (h-1) q blocks leave a host and as many arrive, the least there can be (a flat ring: h q - 1;
// direct: q times as many), after two hops. An all_to_all has nothing to save there: each of its
// blocks is for one rank only, so it stays direct.
//
// Deputies work in rounds, so that a FIFO within a host need hold no more than one piece: of all
// ranks, the one that is the farthest behind finds what it waits for, and room for what it sends.
#pragma once

#include <algorithm>
#include <vector>

#include "xla_ffi/algorithms/on_host.h"
#include "xla_ffi/algorithms/work.h"

namespace jaxring {

// Who acts for a rank on another host.
inline int deputy_of(const HostLayout& layout, int rank, int host) {
  const std::vector<int>& ranks = layout.ranks[host];
  return ranks[layout.index_on_host(rank) % ranks.size()];
}

// By rank of a host: whose deputy it is, the next host's first.
struct Deputies {
  std::vector<std::vector<int>> acts_for;
  size_t rounds = 0;

  Deputies(const HostLayout& layout, int host) {
    const size_t count = layout.ranks[host].size();
    for (size_t place = 0; place < count; ++place) {
      std::vector<int> absent;
      for (int hop = 1; hop < layout.host_count(); ++hop) {
        const std::vector<int>& ranks = layout.ranks[(host + hop) % layout.host_count()];
        for (size_t i = place; i < ranks.size(); i += count) absent.push_back(ranks[i]);
      }
      rounds = std::max(rounds, absent.size());
      acts_for.push_back(std::move(absent));
    }
  }
};

// f(mate, whom it acts for) for those of a host that have something to do in a round.
template <class F>
void for_deputies(const std::vector<int>& mates, const Deputies& deputies, size_t round, F&& f) {
  for (size_t place = 0; place < mates.size(); ++place) {
    const std::vector<int>& absent = deputies.acts_for[place];
    if (round < absent.size()) f(mates[place], absent[round]);
  }
}

template <class Prims>
void hierarchical_all_gather(Prims& prims, World world, Range message) {
  const OnHost<Prims> here(prims, world);
  const Deputies deputies(here.layout, here.host);
  const BlockLoops loops(message, world.world_size, world.chunk_elements);

  for (int64_t l = 0; l < loops.loop_count; ++l) {
    here.spread(Peers::none(), loops.piece(l, world.rank));
    for (int hop = 1; hop < here.layout.host_count(); ++hop) {
      const int host = (here.host + hop) % here.layout.host_count();
      prims.send_final(Peers::one(deputy_of(here.layout, world.rank, host)),
                       loops.piece(l, world.rank));
    }
    for (int mate : here.mates) {
      if (mate != world.rank) prims.recv_copy(Peers::one(mate), loops.piece(l, mate));
    }
    for (size_t round = 0; round < deputies.rounds; ++round) {
      for_deputies(here.mates, deputies, round, [&](int mate, int absent) {
        if (mate == world.rank) here.spread(Peers::one(absent), loops.piece(l, absent));
      });
      for_deputies(here.mates, deputies, round, [&](int mate, int absent) {
        if (mate != world.rank) prims.recv_copy(Peers::one(mate), loops.piece(l, absent));
      });
    }
  }
}

template <class Prims>
void hierarchical_reduce_scatter(Prims& prims, World world, Range message) {
  const OnHost<Prims> here(prims, world);
  const Deputies deputies(here.layout, here.host);
  const BlockLoops loops(message, world.world_size, world.chunk_elements);

  for (int64_t l = 0; l < loops.loop_count; ++l) {
    for (size_t round = 0; round < deputies.rounds; ++round) {
      for_deputies(here.mates, deputies, round, [&](int mate, int absent) {
        if (mate != world.rank) prims.send(Peers::one(mate), loops.piece(l, absent));
      });
      for_deputies(here.mates, deputies, round, [&](int mate, int absent) {
        if (mate != world.rank) return;
        const Range piece = loops.piece(l, absent);
        prims.send(Peers::one(absent), piece, here.reduce(piece));
      });
    }
    for (int mate : here.mates) {
      if (mate != world.rank) prims.send(Peers::one(mate), loops.piece(l, mate));
    }
    const Range piece = loops.piece(l, world.rank);
    if (here.layout.host_count() == 1) {
      here.with_others([&](Peers others) { prims.recv_reduce_copy(others, piece); });
      continue;
    }
    Own own = here.reduce(piece);
    for (int hop = 1; hop < here.layout.host_count(); ++hop) {
      const int host = (here.host + hop) % here.layout.host_count();
      const Peers deputy = Peers::one(deputy_of(here.layout, world.rank, host));
      if (hop == here.layout.host_count() - 1) {
        prims.recv_reduce_copy(deputy, piece, own);
      } else {
        prims.recv_reduce_keep(deputy, piece, own);
        own = Own::kKept;
      }
    }
  }
}

}  // namespace jaxring
