// Rank-order sums have the same bits whatever the algorithm, the chunks, the leaves, the layout of
// the ranks and the repeat. Values whose sum depends on the order would tell.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "world.h"

namespace jaxring::testing {
namespace {

template <typename T>
std::vector<T> random_values(int rank, int64_t count) {
  std::mt19937 random(rank + 1);
  std::vector<T> values(count);
  for (T& value : values) {
    const float magnitude = std::ldexp(1.0f, static_cast<int>(random() % 24) - 12);
    value = static_cast<T>((static_cast<float>(random() % 20001) / 10000.0f - 1.0f) * magnitude);
  }
  return values;
}

// Rank 0's result; all ranks must have the same.
template <typename T>
std::vector<T> result_of(TestWorld& world, CallInfo call, int64_t count, int64_t first_leaf,
                         uint64_t run_id) {
  call.dtype = DTypeTraits<T>::dtype;
  const auto info = make_info(call, count);
  std::vector<std::vector<T>> outputs(world.world_size(), std::vector<T>(count));
  world.spawn([&](int rank) {
    const std::vector<T> input = random_values<T>(rank, count);
    Request request;
    request.info = info;
    request.rank = rank;
    request.run_id = run_id;
    for (const Range leaf : {Range{0, first_leaf}, Range{first_leaf, count - first_leaf}}) {
      request.input.add(input.data() + leaf.offset, leaf.count);
      request.output.add(outputs[rank].data() + leaf.offset, leaf.count);
    }
    const auto error = Submitted::start(world.of_rank(rank), std::move(request)).error();
    EXPECT_FALSE(error) << error->text();
  });
  for (const auto& output : outputs) {
    EXPECT_EQ(0, std::memcmp(output.data(), outputs[0].data(), count * sizeof(T)));
  }
  return outputs[0];
}

template <typename T>
class Determinism : public ::testing::Test {};
using Types = ::testing::Types<float, BFloat16, double, Float16>;
TYPED_TEST_SUITE(Determinism, Types);

TYPED_TEST(Determinism, SameBitsForAlgorithmChunkLeavesLayoutAndRepeat) {
  using T = TypeParam;
  for (int world_size : {2, 3, 5}) {
    for (int64_t count : {int64_t{101}, int64_t{70001}}) {
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kProd}) {
        std::vector<T> expected;
        for (Layout layout :
             {Layout::kDevices, Layout::kProcesses, Layout::kTwoDevicesPerProcess}) {
          TestWorld world(layout, world_size);
          uint64_t run_id = 1;
          for (Algorithm algorithm : {Algorithm::kDirect, Algorithm::kChain, Algorithm::kReducer}) {
            for (int64_t chunk_bytes : {0, 0, 4096}) {
              CallInfo call;
              call.op = op;
              call.algorithm = algorithm;
              call.chunk_bytes = chunk_bytes;
              const int64_t first_leaf = chunk_bytes == 0 ? 0 : count / 7;
              const std::vector<T> got = result_of<T>(world, call, count, first_leaf, run_id++);
              if (expected.empty()) expected = got;
              ASSERT_EQ(0, std::memcmp(got.data(), expected.data(), count * sizeof(T)))
                  << info_of(algorithm).name << ", " << name_of(layout) << ", " << world_size
                  << " ranks, " << count << " elements, chunk " << chunk_bytes;
            }
          }
        }
      }
    }
  }
}

// The values do tell: a ring's order gives other bits.
TEST(DeterminismValues, DependOnTheOrder) {
  TestWorld world(Layout::kDevices, 5);
  CallInfo direct, ring;
  direct.algorithm = Algorithm::kDirect;
  ring.algorithm = Algorithm::kRing;
  const auto a = result_of<float>(world, direct, 70001, 0, 1);
  const auto b = result_of<float>(world, ring, 70001, 0, 2);
  EXPECT_NE(0, std::memcmp(a.data(), b.data(), a.size() * sizeof(float)));
}

// Reducing to one rank, or to each rank's block, sums in the same order as reducing to all.
TEST(DeterminismValues, ReduceAndReduceScatterAgreeWithAllreduce) {
  const int64_t block = 30011;
  for (Layout layout : {Layout::kDevices, Layout::kProcesses}) {
    TestWorld world(layout, 4);
    CallInfo all;
    const auto expected = result_of<float>(world, all, 4 * block, 0, 1);
    for (Collective collective : {Collective::kReduce, Collective::kReduceScatter}) {
      CallInfo call;
      call.collective = collective;
      call.deterministic = true;
      const auto info = make_info(call, 4 * block);
      std::vector<float> result(4 * block);
      world.spawn([&](int rank) {
        const std::vector<float> input = random_values<float>(rank, 4 * block);
        std::vector<float> zeros(4 * block);
        Request request;
        request.info = info;
        request.rank = rank;
        request.run_id = 2 + static_cast<int>(collective);
        request.input.add(input.data(), 4 * block);
        if (collective == Collective::kReduce) {
          request.output.add(rank == 0 ? result.data() : zeros.data(), 4 * block);
        } else {
          request.output.begin_at(rank * block);
          request.output.add(result.data() + rank * block, block);
        }
        const auto error = Submitted::start(world.of_rank(rank), std::move(request)).error();
        EXPECT_FALSE(error) << error->text();
      });
      EXPECT_EQ(0, std::memcmp(result.data(), expected.data(), result.size() * sizeof(float)))
          << name_of(collective);
    }
  }
}

}  // namespace
}  // namespace jaxring::testing
