// Who talks to whom: pure functions of rank and world size.
#pragma once

#include "xla_ffi/core/macros.h"

namespace jaxring {

// A set of peers, small enough to travel in a step: nobody, one, two, or all of a range of ranks
// but one.
class Peers {
 public:
  JR_HOST_DEVICE static Peers none() { return Peers(0, -1, -1, false); }
  JR_HOST_DEVICE static Peers one(int rank) {
    return rank < 0 ? none() : Peers(1, rank, -1, false);
  }
  JR_HOST_DEVICE static Peers all_but(int rank, int world_size) {
    return range_but(rank, 0, world_size);
  }
  // Of ranks [begin, end), one of which `rank` is.
  JR_HOST_DEVICE static Peers range_but(int rank, int begin, int end) {
    return Peers(end - begin - 1, rank, begin, true);
  }
  // Either may be -1 (absent), as a tree's children are.
  JR_HOST_DEVICE static Peers two(int a, int b) {
    if (a < 0) return one(b);
    if (b < 0) return one(a);
    return a < b ? Peers(2, a, b, false) : Peers(2, b, a, false);
  }

  JR_HOST_DEVICE int count() const { return count_; }
  // The index-th peer; ranks ascend, which is what makes sums of several peers rank-ordered.
  JR_HOST_DEVICE int operator[](int index) const {
    if (!range_) return index == 0 ? first_ : second_;
    const int rank = second_ + index;
    return rank < first_ ? rank : rank + 1;
  }

 private:
  JR_HOST_DEVICE Peers(int count, int first, int second, bool range)
      : count_(count), first_(first), second_(second), range_(range) {}
  int count_;
  int first_;   // of a range: the rank left out
  int second_;  // of a range: where it begins
  bool range_;
};

struct Ring {
  int rank;
  int world_size;
  JR_HOST_DEVICE int next() const { return (rank + 1) % world_size; }
  JR_HOST_DEVICE int previous() const { return (rank + world_size - 1) % world_size; }
  // The chunk that is `hops` places behind this rank on the ring.
  JR_HOST_DEVICE int chunk_behind(int hops) const {
    return ((rank - hops) % world_size + world_size) % world_size;
  }
};

// Ranks as the corners of a hypercube, whose edges join indices that differ in one bit. Where the
// world is no power of two, `extra` pairs of ranks share a corner: 2i stands there for itself and
// 2i + 1.
//
//    ranks   0 1 | 2 3 | 4   5      n = 6: 4 corners, 2 of them shared
//    corner   0     1    2   3
struct Hypercube {
  int rank;
  int corners = 1;
  int extra;
  int corner;

  JR_HOST_DEVICE Hypercube(int rank_, int world_size) : rank(rank_) {
    while (corners * 2 <= world_size) corners *= 2;
    extra = world_size - corners;
    corner = rank < 2 * extra ? rank / 2 : rank - extra;
  }
  JR_HOST_DEVICE bool shares() const { return rank < 2 * extra; }
  JR_HOST_DEVICE bool represented() const { return shares() && rank % 2 == 1; }
  JR_HOST_DEVICE int partner() const { return rank ^ 1; }
  JR_HOST_DEVICE int neighbour(int bit) const {
    const int other = corner ^ bit;
    return other < extra ? 2 * other : other + extra;
  }
};

// A rank's place in a tree: its parent (-1 at the root) and its children (-1 where absent).
struct TreeNode {
  int up;
  int down[2];
};

// The in-order binary tree over ranks 0..n-1: a rank's height is the number of its trailing zero
// bits.
//
//    0 ----------- 8              n = 12
//             ____/ \____          .
//            4           10        .
//          /   \        /  \       .
//         2     6      9    11     .
//        / \   / \                 .
//       1   3 5   7                .
//
// Odd ranks are leaves, so mirroring or shifting the ranks gives a second tree in which nearly
// every inner node of the first is a leaf: Sanders, Speck, Traeff, Parallel Computing 35(12), 2009.
JR_HOST_DEVICE inline TreeNode binary_tree(int rank, int world_size) {
  int span = 1;  // the lowest set bit of rank; for rank 0 the first power of two >= world_size
  while (span < world_size && (rank & span) == 0) span <<= 1;
  TreeNode node{-1, {-1, -1}};
  if (rank != 0) {
    const int above = (rank ^ span) | (span << 1);
    node.up = above < world_size ? above : rank ^ span;
  }
  const int half = span >> 1;
  if (half == 0) return node;
  if (rank != 0) node.down[0] = rank - half;
  int right = half;
  while (right > 0 && rank + right >= world_size) right >>= 1;
  if (right > 0) node.down[1] = rank + right;
  return node;
}

// Tree `index` (0 or 1) of the double binary tree: the second is the first mirrored (even world) or
// shifted by one (odd world).
JR_HOST_DEVICE inline TreeNode double_binary_tree(int rank, int world_size, int index) {
  if (index == 0) return binary_tree(rank, world_size);
  const bool mirror = world_size % 2 == 0;
  TreeNode node = binary_tree(mirror ? world_size - 1 - rank : (rank + world_size - 1) % world_size,
                              world_size);
  auto back = [&](int r) {
    return r < 0 ? -1 : mirror ? world_size - 1 - r : (r + 1) % world_size;
  };
  return TreeNode{back(node.up), {back(node.down[0]), back(node.down[1])}};
}

// The tree over ranks root, root + 1, … (modulo the world) whose root is `root`.
JR_HOST_DEVICE inline TreeNode rooted_tree(int rank, int world_size, int root) {
  const TreeNode node = binary_tree((rank - root + world_size) % world_size, world_size);
  auto back = [&](int r) { return r < 0 ? -1 : (r + root) % world_size; };
  return TreeNode{back(node.up), {back(node.down[0]), back(node.down[1])}};
}

// A tree without branches, rank 0 its leaf: what goes up it is summed in rank order.
JR_HOST_DEVICE inline TreeNode chain(int rank, int world_size) {
  return TreeNode{rank + 1 < world_size ? rank + 1 : -1, {rank - 1, -1}};
}

}  // namespace jaxring
