// Double binary tree allreduce: each half of the message is reduced up one tree and broadcast down
// it; an inner node of one tree is a leaf of the other (core/topology.h), so that a rank sends and
// receives about 2 n in all, with 2 log2(p) hops of latency. Sanders, Speck, Traeff, Parallel
// Computing 35(12), 2009.
//
//   up:    leaves send; inner nodes add their term and pass on; the root has the sum
//   down:  the root sends; inner nodes keep a copy and pass on
//
// Within a fold, operands come in rank order, but the grouping is the tree's: reproducible, not
// rank order. On the tree without branches, the chain, it is rank order: 2 n per rank, p - 1 hops
// each way, pipelined by chunks.
#pragma once

#include "xla_ffi/algorithms/prims.h"

namespace jaxring {

// A chunk's way down starts this many chunks after its way up, so that both directions are busy.
// With FIFOs of two chunks per direction the ranks cannot wait in a circle while the lag is below
// twice that: a parent blocked at chunk j on a full way down has freed the way up to chunk j - 1,
// and its child, at most lag chunks behind on the way down, always reaches the slot that is waited
// for.
constexpr int64_t kTreeLagChunks = 2;

template <class Prims>
JR_HOST_DEVICE void tree_up(Prims& prims, TreeNode node, Range chunk) {
  const Peers children = Peers::two(node.down[0], node.down[1]);
  if (node.up < 0) {
    prims.recv_reduce_copy_send(children, children, chunk);
  } else if (children.count() == 0) {
    prims.send(Peers::one(node.up), chunk);
  } else {
    prims.recv_reduce_send(children, Peers::one(node.up), chunk);
  }
}

template <class Prims>
JR_HOST_DEVICE void tree_down(Prims& prims, TreeNode node, Range chunk) {
  const Peers children = Peers::two(node.down[0], node.down[1]);
  if (node.up < 0) return;  // the root has sent on its way up
  if (children.count() == 0) {
    prims.recv_copy(Peers::one(node.up), chunk);
  } else {
    prims.recv_copy_send(Peers::one(node.up), children, chunk);
  }
}

// One tree over `message`; the caller gives each tree its own half and its own channel.
template <class Prims>
JR_HOST_DEVICE void tree_allreduce(Prims& prims, World world, TreeNode node, Range message) {
  const Loops chunks = loops_of(message, world.chunk_elements);
  for (int64_t up = 0; up < chunks.loop_count + kTreeLagChunks; ++up) {
    if (up < chunks.loop_count) tree_up(prims, node, chunks[up]);
    const int64_t down = up - kTreeLagChunks;
    if (down >= 0) tree_down(prims, node, chunks[down]);
  }
}

// Down a tree only, from its root.
template <class Prims>
JR_HOST_DEVICE void tree_broadcast(Prims& prims, World world, TreeNode node, Range message) {
  const Peers children = Peers::two(node.down[0], node.down[1]);
  const Loops chunks = loops_of(message, world.chunk_elements);
  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (node.up < 0) prims.copy_send(children, chunks[c]);
    tree_down(prims, node, chunks[c]);
  }
}

// Up a tree only, to its root; everywhere else the result is zero.
template <class Prims>
JR_HOST_DEVICE void tree_reduce(Prims& prims, World world, TreeNode node, Range message) {
  const Peers children = Peers::two(node.down[0], node.down[1]);
  const Loops chunks = loops_of(message, world.chunk_elements);
  for (int64_t c = 0; c < chunks.loop_count; ++c) {
    if (node.up < 0) {
      prims.recv_reduce_copy(children, chunks[c]);
    } else {
      tree_up(prims, node, chunks[c]);
      prims.zero(chunks[c]);
    }
  }
}

}  // namespace jaxring
