// Everything through rank 0: the single-reducer (parameter server) baseline that Baidu's article on
// ring allreduce compares with. Rank 0 sends and receives (p-1) n, everybody else n.
#pragma once

#include "xla_ffi/algorithms/prims.h"

namespace jaxring {

template <class Prims>
JR_HOST_DEVICE void reducer_allreduce(Prims& prims, World world, Range message) {
  const Peers others = Peers::all_but(0, world.world_size);
  const Loops chunks = loops_of(message, world.chunk_elements);

  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (world.rank == 0) {
      prims.recv_reduce_copy_send(others, others, chunks[c]);
    } else {
      prims.send(Peers::one(0), chunks[c]);
      prims.recv_copy(Peers::one(0), chunks[c]);
    }
  }
}

}  // namespace jaxring
