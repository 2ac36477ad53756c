// Ring reduce-scatter and all-gather, and the allreduce that is both in a row.
//
//   0 -> 1 -> 2 -> 3 -> 0      every loop has one chunk for each rank
//
//   reduce-scatter: chunk c starts at rank c+1, gathers one rank's term at each hop and is complete
//   at rank c after world_size - 1 hops; all-gather: it then travels once more around.
//
// Each half sends and receives (p-1)/p n per rank, independent of p but for the fraction:
// bandwidth-optimal (Patarasuk, Yuan, JPDC 69(2), 2009; Baidu's baidu-allreduce). The sum of chunk
// c starts at rank c+1, so different chunks are summed in different orders: reproducible, but not
// rank order.
#pragma once

#include "xla_ffi/algorithms/prims.h"
#include "xla_ffi/algorithms/work.h"

namespace jaxring {

// One rank's two neighbours, and what it does with one loop's chunks: `chunk(hops)` is that of the
// rank so many places behind.
template <class Prims>
struct RingHops {
  Prims& prims;
  const int world_size;
  const Peers next;
  const Peers previous;

  JR_HOST_DEVICE RingHops(Prims& p, Ring ring)
      : prims(p),
        world_size(ring.world_size),
        next(Peers::one(ring.next())),
        previous(Peers::one(ring.previous())) {}

  // All hops of the reduce-scatter but the last, which ends at chunk(0).
  template <class Chunk>
  JR_HOST_DEVICE void reduce(Chunk chunk) {
    prims.send(next, chunk(1));
    for (int hop = 2; hop < world_size; ++hop) {
      prims.recv_reduce_send(previous, next, chunk(hop));
    }
  }
  // All hops of the all-gather but the first, which sends chunk(0).
  template <class Chunk>
  JR_HOST_DEVICE void gather(Chunk chunk) {
    for (int hop = 1; hop < world_size - 1; ++hop) {
      prims.recv_copy_send(previous, next, chunk(hop));
    }
    prims.recv_copy(previous, chunk(world_size - 1));
  }
};

template <class Prims>
JR_HOST_DEVICE void ring_allreduce(Prims& prims, World world, Range message) {
  const Ring ring{world.rank, world.world_size};
  RingHops<Prims> hops(prims, ring);
  const Loops loops = loops_of(message, world.world_size * world.chunk_elements);
  for (int64_t l = 0; l < loops.loop_count; ++l) {
    auto chunk = [&](int hop) {
      return piece_of(loops[l], world.world_size, ring.chunk_behind(hop));
    };
    hops.reduce(chunk);
    prims.recv_reduce_copy_send(hops.previous, hops.next, chunk(0));
    hops.gather(chunk);
  }
}

template <class Prims>
JR_HOST_DEVICE void ring_reduce_scatter(Prims& prims, World world, Range message) {
  const Ring ring{world.rank, world.world_size};
  RingHops<Prims> hops(prims, ring);
  const BlockLoops loops(message, world.world_size, world.chunk_elements);
  for (int64_t l = 0; l < loops.loop_count; ++l) {
    auto chunk = [&](int hop) { return loops.piece(l, ring.chunk_behind(hop)); };
    hops.reduce(chunk);
    prims.recv_reduce_copy(hops.previous, chunk(0));
  }
}

template <class Prims>
JR_HOST_DEVICE void ring_all_gather(Prims& prims, World world, Range message) {
  const Ring ring{world.rank, world.world_size};
  RingHops<Prims> hops(prims, ring);
  const BlockLoops loops(message, world.world_size, world.chunk_elements);
  for (int64_t l = 0; l < loops.loop_count; ++l) {
    auto chunk = [&](int hop) { return loops.piece(l, ring.chunk_behind(hop)); };
    prims.copy_send(hops.next, chunk(0));
    hops.gather(chunk);
  }
}

}  // namespace jaxring
