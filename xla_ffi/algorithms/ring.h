// Ring allreduce: reduce-scatter, then all-gather, around one ring.
//
//   0 -> 1 -> 2 -> 3 -> 0      every loop is cut into world_size chunks
//
//   reduce-scatter: chunk c starts at rank c+1, gathers one rank's term at each hop and is complete
//   at rank c after world_size - 1 hops; all-gather: it then travels once more around.
//
// Each rank sends and receives 2 (p-1)/p n, independent of p but for the fraction:
// bandwidth-optimal (Patarasuk, Yuan, JPDC 69(2), 2009; Baidu's baidu-allreduce). The sum of chunk
// c starts at rank c+1, so different chunks are summed in different orders: reproducible, but not
// rank order.
#pragma once

#include "xla_ffi/algorithms/prims.h"

namespace jaxring {

template <class Prims>
JR_HOST_DEVICE void ring_allreduce(Prims& prims, World world, Range message) {
  const Ring ring{world.rank, world.world_size};
  const Peers next = Peers::one(ring.next());
  const Peers previous = Peers::one(ring.previous());
  const Loops loops = loops_of(message, world.world_size * world.chunk_elements);

  for (int64_t l = 0; l < loops.loop_count; ++l) {
    auto chunk = [&](int hops) {
      return piece_of(loops[l], world.world_size, ring.chunk_behind(hops));
    };
    prims.send(next, chunk(1));
    for (int hop = 2; hop < world.world_size; ++hop) {
      prims.recv_reduce_send(previous, next, chunk(hop));
    }
    prims.recv_reduce_copy_send(previous, next, chunk(0));
    for (int hop = 1; hop < world.world_size - 1; ++hop) {
      prims.recv_copy_send(previous, next, chunk(hop));
    }
    prims.recv_copy(previous, chunk(world.world_size - 1));
  }
}

}  // namespace jaxring
