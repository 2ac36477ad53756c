// Direct allreduce over FIFOs, two-shot: every rank sends each peer the piece that peer owns, sums
// its own piece in rank order, and sends the result to all.
//
//          piece 0  piece 1  piece 2
//   rank 0   SUM   -> 1     -> 2         then every SUM goes to everybody
//   rank 1  -> 0     SUM    -> 2
//   rank 2  -> 0    -> 1      SUM
//
// 2 (p-1)/p n sent and received per rank in two hops; a rank-order sum whatever the chunking, so
// every rank, chunk size and repeat gives the same bits. Where peers' memory can be read in place
// the same sum needs no FIFO (host/in_place.h).
#pragma once

#include "xla_ffi/algorithms/prims.h"

namespace jaxring {

template <class Prims>
JR_HOST_DEVICE void direct_allreduce(Prims& prims, World world, Range message) {
  const Peers others = Peers::all_but(world.rank, world.world_size);
  const Loops loops = loops_of(message, world.world_size * world.chunk_elements);

  for (int64_t l = 0; l < loops.loop_count; ++l) {
    auto piece = [&](int owner) { return piece_of(loops[l], world.world_size, owner); };
    for (int i = 0; i < others.count(); ++i) prims.send(Peers::one(others[i]), piece(others[i]));
    prims.recv_reduce_copy_send(others, others, piece(world.rank));
    for (int i = 0; i < others.count(); ++i)
      prims.recv_copy(Peers::one(others[i]), piece(others[i]));
  }
}

}  // namespace jaxring
