// Recursive halving and doubling on a hypercube: Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005.
//
//   corner   00      01      10      11
//   halving, bit 2:  00 <-> 10, 01 <-> 11, each gives away half of the chunk and adds the other
//            bit 1:  00 <-> 01, 10 <-> 11, the same with what is left: every corner owns a quarter
//   doubling in the reverse order brings the quarters together again
//
// 2 (p-1)/p n per rank as a ring, in 2 log2(p) hops instead of 2 (p-1). Where p is no power of two,
// pairs of ranks share a corner and their messages travel once more (core/topology.h). The order of
// summation is the cube's: reproducible, but not rank order.
#pragma once

#include "xla_ffi/algorithms/prims.h"

namespace jaxring {

// What the corners that agree with `corner` in `bit` and all higher bits own of the chunk together.
JR_HOST_DEVICE inline Range share_of(Range chunk, int corners, int corner, int bit) {
  for (int b = corners / 2; b >= bit; b /= 2) chunk = piece_of(chunk, 2, corner & b ? 1 : 0);
  return chunk;
}

template <class Prims>
JR_HOST_DEVICE void halving_doubling_chunk(Prims& prims, const Hypercube& cube, Range chunk,
                                           Own own) {
  auto mine = [&](int bit) { return share_of(chunk, cube.corners, cube.corner, bit); };
  auto theirs = [&](int bit) { return share_of(chunk, cube.corners, cube.corner ^ bit, bit); };

  for (int bit = cube.corners / 2; bit >= 1; bit /= 2) {
    const Peers neighbour = Peers::one(cube.neighbour(bit));
    prims.send(neighbour, theirs(bit), own);
    if (bit > 1) {
      prims.recv_reduce_keep(neighbour, mine(bit), own);
    } else {
      prims.recv_reduce_copy(neighbour, mine(bit), own);
    }
    own = Own::kKept;
  }
  for (int bit = 1; bit < cube.corners; bit *= 2) {
    const Peers neighbour = Peers::one(cube.neighbour(bit));
    prims.send_final(neighbour, mine(bit), Own::kOutput);
    prims.recv_copy(neighbour, theirs(bit));
  }
}

template <class Prims>
JR_HOST_DEVICE void halving_doubling_allreduce(Prims& prims, World world, Range message) {
  const Hypercube cube(world.rank, world.world_size);
  const Peers partner = Peers::one(cube.partner());
  const Loops chunks = loops_of(message, world.chunk_elements);

  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (cube.represented()) {
      prims.send(partner, chunks[c]);
      prims.recv_copy(partner, chunks[c]);
      continue;
    }
    prims.keep_within(chunks[c]);
    if (cube.shares()) prims.recv_reduce_keep(partner, chunks[c]);
    halving_doubling_chunk(prims, cube, chunks[c], cube.shares() ? Own::kKept : Own::kInput);
    if (cube.shares()) prims.send_final(partner, chunks[c], Own::kOutput);
  }
}

}  // namespace jaxring
