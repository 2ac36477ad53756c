// Direct collectives over FIFOs: every rank exchanges with every other one, in one hop.
//
//          piece 0  piece 1  piece 2
//   rank 0   SUM   -> 1     -> 2         reduce-scatter: every rank sends each peer the piece that
//   rank 1  -> 0     SUM    -> 2         peer owns and sums its own piece, in rank order
//   rank 2  -> 0    -> 1      SUM        all-gather: it sends its own piece to all
//
// The allreduce is both (two-shot): 2 (p-1)/p n sent and received per rank in two hops. Between two
// ranks an exchange of the operands (one-shot) moves the same n in one hop. What is sent first is
// an operand, so it travels in the tensor's own type: half of the bytes for bfloat16. A rank-order
// sum whatever the chunking, so every rank, chunk size and repeat gives the same bits. Where peers'
// memory can be read in place the same needs no FIFO (host/in_place.h).
#pragma once

#include "xla_ffi/algorithms/prims.h"
#include "xla_ffi/algorithms/work.h"

namespace jaxring {

template <class Prims>
JR_HOST_DEVICE void direct_exchange(Prims& prims, World world, Range message) {
  const Peers other = Peers::one(1 - world.rank);
  const Loops chunks = loops_of(message, world.chunk_elements);
  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    prims.send_final(other, chunks[c]);
    prims.recv_inputs_copy(other, chunks[c]);
  }
}

template <class Prims>
JR_HOST_DEVICE void direct_allreduce(Prims& prims, World world, Range message) {
  if (world.world_size == 2) return direct_exchange(prims, world, message);
  const Peers others = Peers::all_but(world.rank, world.world_size);
  const Loops loops = loops_of(message, world.world_size * world.chunk_elements);

  for (int64_t l = 0; l < loops.loop_count; ++l) {
    auto piece = [&](int owner) { return piece_of(loops[l], world.world_size, owner); };
    for (int i = 0; i < others.count(); ++i) {
      prims.send_final(Peers::one(others[i]), piece(others[i]));
    }
    prims.recv_inputs_copy_send(others, others, piece(world.rank));
    for (int i = 0; i < others.count(); ++i)
      prims.recv_copy(Peers::one(others[i]), piece(others[i]));
  }
}

template <class Prims>
JR_HOST_DEVICE void direct_reduce_scatter(Prims& prims, World world, Range message) {
  const Peers others = Peers::all_but(world.rank, world.world_size);
  const BlockLoops loops(message, world.world_size, world.chunk_elements);
  for (int64_t l = 0; l < loops.loop_count; ++l) {
    for (int i = 0; i < others.count(); ++i) {
      prims.send_final(Peers::one(others[i]), loops.piece(l, others[i]));
    }
    prims.recv_inputs_copy(others, loops.piece(l, world.rank));
  }
}

template <class Prims>
JR_HOST_DEVICE void direct_all_gather(Prims& prims, World world, Range message) {
  const Peers others = Peers::all_but(world.rank, world.world_size);
  const BlockLoops loops(message, world.world_size, world.chunk_elements);
  for (int64_t l = 0; l < loops.loop_count; ++l) {
    prims.copy_send(others, loops.piece(l, world.rank));
    for (int i = 0; i < others.count(); ++i) {
      prims.recv_copy(Peers::one(others[i]), loops.piece(l, others[i]));
    }
  }
}

// In the operand block d is for rank d, in the result block s is from rank s. Peers are taken in
// ring order, so that not all ranks send to the same one first.
template <class Prims>
JR_HOST_DEVICE void direct_all_to_all(Prims& prims, World world, Range message) {
  const BlockLoops loops(message, world.world_size, world.chunk_elements);
  for (int64_t l = 0; l < loops.loop_count; ++l) {
    for (int hop = 1; hop < world.world_size; ++hop) {
      const int to = (world.rank + hop) % world.world_size;
      prims.send_final(Peers::one(to), loops.piece(l, to));
    }
    prims.copy(loops.piece(l, world.rank));
    for (int hop = 1; hop < world.world_size; ++hop) {
      const int from = (world.rank + world.world_size - hop) % world.world_size;
      prims.recv_copy(Peers::one(from), loops.piece(l, from));
    }
  }
}

template <class Prims>
JR_HOST_DEVICE void direct_broadcast(Prims& prims, World world, Range message, int root) {
  const Loops chunks = loops_of(message, world.chunk_elements);
  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (world.rank == root) {
      prims.copy_send(Peers::all_but(root, world.world_size), chunks[c]);
    } else {
      prims.recv_copy(Peers::one(root), chunks[c]);
    }
  }
}

// Everywhere else than at the root the result is zero.
template <class Prims>
JR_HOST_DEVICE void direct_reduce(Prims& prims, World world, Range message, int root) {
  const Loops chunks = loops_of(message, world.chunk_elements);
  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (world.rank == root) {
      prims.recv_inputs_copy(Peers::all_but(root, world.world_size), chunks[c]);
    } else {
      prims.send_final(Peers::one(root), chunks[c]);
      prims.zero(chunks[c]);
    }
  }
}

// Each rank sends to at most one rank and receives from at most one; where nobody sends, the result
// is zero.
template <class Prims>
JR_HOST_DEVICE void direct_permute(Prims& prims, World world, const Work& work) {
  const Loops chunks = loops_of(work.message, world.chunk_elements);
  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (work.destination == world.rank) {
      prims.copy(chunks[c]);
      continue;
    }
    if (work.destination >= 0) prims.send_final(Peers::one(work.destination), chunks[c]);
    if (work.source >= 0) {
      prims.recv_copy(Peers::one(work.source), chunks[c]);
    } else {
      prims.zero(chunks[c]);
    }
  }
}

}  // namespace jaxring
