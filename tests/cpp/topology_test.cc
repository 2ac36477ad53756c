#include "xla_ffi/core/topology.h"

#include <gtest/gtest.h>

#include <set>

#include "xla_ffi/core/partition.h"

namespace jaxring {
namespace {

TEST(Tree, EveryRankHasOnePlaceAndParentsKnowTheirChildren) {
  for (int n = 1; n <= 70; ++n) {
    for (int tree = 0; tree < 2; ++tree) {
      int roots = 0;
      for (int rank = 0; rank < n; ++rank) {
        const TreeNode node = double_binary_tree(rank, n, tree);
        int hops = 0;
        for (int at = rank; at >= 0; at = double_binary_tree(at, n, tree).up) {
          ASSERT_LE(++hops, 9) << "n=" << n << " rank=" << rank;  // log2(70) + 2
        }
        if (node.up < 0) {
          ++roots;
        } else {
          const TreeNode parent = double_binary_tree(node.up, n, tree);
          EXPECT_TRUE(parent.down[0] == rank || parent.down[1] == rank);
        }
        for (int child : node.down) {
          if (child < 0) continue;
          EXPECT_EQ(double_binary_tree(child, n, tree).up, rank);
        }
      }
      EXPECT_EQ(roots, 1) << "n=" << n << " tree=" << tree;
    }
  }
}

// What makes the double tree bandwidth-optimal: nearly no rank is an inner node of both trees.
TEST(Tree, InnerNodesOfOneTreeAreLeavesOfTheOther) {
  for (int n = 2; n <= 64; ++n) {
    int inner_twice = 0;
    for (int rank = 0; rank < n; ++rank) {
      int inner = 0;
      for (int tree = 0; tree < 2; ++tree) {
        const TreeNode node = double_binary_tree(rank, n, tree);
        inner += node.down[0] >= 0 || node.down[1] >= 0;
      }
      inner_twice += inner == 2;
    }
    EXPECT_LE(inner_twice, 1) << "n=" << n;
  }
}

TEST(Peers, AllButListsEveryOtherRankInOrder) {
  const Peers others = Peers::all_but(2, 5);
  ASSERT_EQ(others.count(), 4);
  const int expected[] = {0, 1, 3, 4};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(others[i], expected[i]);
  EXPECT_EQ(Peers::two(7, 3)[0], 3);
  EXPECT_EQ(Peers::two(-1, 3).count(), 1);
  EXPECT_EQ(Peers::two(-1, -1).count(), 0);
}

TEST(Partition, PiecesCoverTheWholeWithoutOverlap) {
  for (int64_t count : {0, 1, 5, 16, 1009}) {
    for (int64_t parts : {1, 2, 3, 7, 16}) {
      int64_t next = 100;
      for (int64_t i = 0; i < parts; ++i) {
        const Range piece = piece_of(Range{100, count}, parts, i);
        EXPECT_EQ(piece.offset, next);
        EXPECT_LE(piece.count, count / parts + 1);
        next += piece.count;
      }
      EXPECT_EQ(next, 100 + count);
    }
  }
  EXPECT_EQ(loops_of(Range{0, 0}, 10).loop_count, 1);
  EXPECT_EQ(loops_of(Range{0, 21}, 10).loop_count, 3);
}

}  // namespace
}  // namespace jaxring
