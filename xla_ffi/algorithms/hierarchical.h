// Two levels: direct within a host, over its shared memory, and another schedule between hosts.
//
//   host 0         host 1           4 ranks, 2 lanes: a lane has one rank of each host, its owner,
//   rank 0  1      rank 2  3        and a share of the message
//   (1)  0 <-> 1   2 <-> 3          within: every rank gives each owner of its host that owner's
//   (2)  0 <------> 2               share, who adds them up
//           1 <------> 3            between: the owners of a lane allreduce its share
//   (3)  0 <-> 1   2 <-> 3          within: each owner gives the result to its host's other ranks
//
// With a ring between h hosts 2 (h-1)/h n crosses each host's link, whatever the number of ranks
// there, spread over all lanes (a flat ring: 2 (p-1)/p n; halving and doubling more). Two channels,
// each with half of the message, work independently: while one waits for the network the other one
// has work within the host. Hosts may have unequally many ranks: those beyond the fewest own
// nothing. Reproducible, not rank order. Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005; Horovod
// has the same of NCCL and MPI.
#pragma once

#include "xla_ffi/algorithms/halving_doubling.h"
#include "xla_ffi/algorithms/on_host.h"
#include "xla_ffi/algorithms/ring.h"
#include "xla_ffi/algorithms/tree.h"

namespace jaxring {

// Prims among one lane's owners: a schedule written for ranks 0 … h-1 runs on hosts, and adds to
// what its rank has kept (or, alone on its host, to its input).
template <class Prims>
class LanePrims : public Verbs<LanePrims<Prims>> {
 public:
  LanePrims(Prims& prims, const HostLayout& layout, int lane, Own own)
      : prims_(prims), layout_(layout), lane_(lane), own_(own) {}

  void step(Peers from, Peers to, Range range, Own own, Into into) {
    prims_.step(owners(from), owners(to), range, own == Own::kInput ? own_ : own, into);
  }
  // What is kept stays where hierarchical_allreduce has begun to keep it.
  void keep_within(Range /*window*/) {}

 private:
  int owner(int host) const { return layout_.ranks[host][lane_]; }
  Peers owners(Peers hosts) const {
    return hosts.count() == 0   ? Peers::none()
           : hosts.count() == 1 ? Peers::one(owner(hosts[0]))
                                : Peers::two(owner(hosts[0]), owner(hosts[1]));
  }

  Prims& prims_;
  const HostLayout& layout_;
  const int lane_;
  const Own own_;
};

// The allreduce between the owners of a lane: a ring, or where its pieces would be so small that
// hops cost more than bytes, fewer hops.
template <class Prims>
void allreduce_between_hosts(LanePrims<Prims>& lane_prims, World hosts, int lane, Range range) {
  constexpr int64_t kLeastRingElements = 4096;
  const bool many_hops = hosts.world_size > 2;
  if (!many_hops || range.count >= hosts.world_size * kLeastRingElements) {
    return ring_allreduce(lane_prims, hosts, range);
  }
  if ((hosts.world_size & (hosts.world_size - 1)) == 0) {
    return halving_doubling_allreduce(lane_prims, hosts, range);
  }
  tree_allreduce(lane_prims, hosts, double_binary_tree(hosts.rank, hosts.world_size, lane % 2),
                 range);
}

// A lane's piece is two chunks: half of a FIFO within the host, and for each of h hosts at most one
// chunk between them.
template <class Prims>
void hierarchical_allreduce(Prims& prims, World world, Range message) {
  const OnHost<Prims> here(prims, world);
  const HostLayout& layout = here.layout;
  const int own_lane = layout.index_on_host(world.rank);
  const World hosts{here.host, layout.host_count(), world.chunk_elements};
  const Loops loops = loops_of(message, 2 * world.chunk_elements * layout.lanes);

  for (int64_t l = 0; l < loops.loop_count; ++l) {
    auto for_other_owners = [&](auto&& f) {
      for (int lane = 0; lane < layout.lanes; ++lane) {
        const int owner = here.mates[lane];
        if (owner != world.rank) f(Peers::one(owner), piece_of(loops[l], layout.lanes, lane));
      }
    };
    for_other_owners([&](Peers owner, Range share) { prims.send(owner, share); });
    if (own_lane < layout.lanes) {
      const Range share = piece_of(loops[l], layout.lanes, own_lane);
      if (layout.host_count() == 1) {
        here.with_others([&](Peers others) { prims.recv_reduce_copy(others, share); });
      } else {
        LanePrims<Prims> lane_prims(prims, layout, own_lane, here.reduce(share));
        allreduce_between_hosts(lane_prims, hosts, own_lane, share);
      }
      here.share(share);
    }
    for_other_owners([&](Peers owner, Range share) { prims.recv_copy(owner, share); });
  }
}

// A host's place in the tree of hosts, in which one rank speaks for each: the root for its own.
struct Speakers {
  int own;
  Peers up, down;
};

inline Speakers speakers_around(const HostLayout& layout, int host, int root) {
  auto of_host = [&](int h) {
    return h < 0 ? -1 : h == layout.host_of[root] ? root : layout.ranks[h].front();
  };
  const TreeNode node = rooted_tree(host, layout.host_count(), layout.host_of[root]);
  return {of_host(host), Peers::one(of_host(node.up)),
          Peers::two(of_host(node.down[0]), of_host(node.down[1]))};
}

// Down a tree of hosts and, in each, from the one who is in the tree to the others.
template <class Prims>
void hierarchical_broadcast(Prims& prims, World world, Range message, int root) {
  const OnHost<Prims> here(prims, world);
  const auto [speaker, up, down] = speakers_around(here.layout, here.host, root);
  const Loops chunks = loops_of(message, world.chunk_elements);

  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (world.rank == root) {
      prims.copy_send(down, chunks[c]);
    } else if (world.rank == speaker) {
      prims.recv_copy_send(up, down, chunks[c]);
    } else {
      prims.recv_copy(Peers::one(speaker), chunks[c]);
    }
    if (world.rank == speaker) here.share(chunks[c]);
  }
}

// The same way up; everywhere else than at the root the result is zero.
template <class Prims>
void hierarchical_reduce(Prims& prims, World world, Range message, int root) {
  const OnHost<Prims> here(prims, world);
  const auto [speaker, up, down] = speakers_around(here.layout, here.host, root);
  const Loops chunks = loops_of(message, world.chunk_elements);

  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (world.rank != speaker) {
      prims.send(Peers::one(speaker), chunks[c]);
      prims.zero(chunks[c]);
      continue;
    }
    const Own own = here.reduce(chunks[c]);
    if (world.rank == root) {
      prims.recv_reduce_copy(down, chunks[c], own);
      continue;
    }
    prims.recv_reduce_send(down, up, chunks[c], own);
    prims.zero(chunks[c]);
  }
}

}  // namespace jaxring
