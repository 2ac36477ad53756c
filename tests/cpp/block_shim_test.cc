// The device's primitives and every schedule on them, run by host threads (see
// xla_ffi/cuda/primitives.cuh).
#include "block_shim.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "reference.h"

namespace jaxring::testing {
namespace {

template <typename T>
std::vector<std::vector<T>> random_inputs(int world_size, int64_t count, bool small_integers,
                                          int seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<T>> inputs(world_size, std::vector<T>(count));
  for (auto& input : inputs) {
    for (T& element : input) {
      const int integer = static_cast<int>(random() % 17) - 8;
      const float real = static_cast<float>(random()) / 4e9f - 0.5f;
      element = static_cast<T>(small_integers ? static_cast<float>(integer) : real);
    }
  }
  return inputs;
}

// In rank order, rounded once.
template <typename T>
std::vector<T> expected_of(ReduceOp op, const std::vector<std::vector<T>>& inputs) {
  using A = AccumulatorOf<T>;
  std::vector<T> expected(inputs[0].size());
  for (size_t i = 0; i < expected.size(); ++i) {
    A sum = static_cast<A>(inputs[0][i]);
    for (size_t rank = 1; rank < inputs.size(); ++rank) {
      sum = reference::combine<A>(op, sum, static_cast<A>(inputs[rank][i]));
    }
    if (op == ReduceOp::kMean) sum = reference::divided(sum, inputs.size());
    expected[i] = static_cast<T>(sum);
  }
  return expected;
}

class BlockShim : public ::testing::TestWithParam<std::tuple<Algorithm, int>> {
 protected:
  // Small integers hide the order of a sum, so that one reference serves every schedule.
  template <typename T, class Functor>
  void check(ShimWorld& world, ReduceOp op, int64_t count, bool small_integers) {
    const auto [algorithm, world_size] = GetParam();
    const auto inputs = random_inputs<T>(world_size, count, small_integers, ++seed_);
    std::vector<std::vector<T>> outputs(world_size, std::vector<T>(count));
    const int stopped = world.allreduce<T, Functor>(algorithm, inputs, outputs);
    ASSERT_EQ(stopped, 0) << "status " << std::hex << world.status;
    const std::vector<T> expected = expected_of(op, inputs);
    for (int rank = 0; rank < world_size; ++rank) {
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_TRUE(reference::same(outputs[rank][i], expected[i]))
            << "rank " << rank << ", element " << i << " of " << count;
      }
    }
  }

  int seed_ = 0;
};

// One world for all: a later operation starts where the FIFOs of an earlier one stand.
TEST_P(BlockShim, EqualsTheReference) {
  ShimWorld world(std::get<1>(GetParam()));
  for (const int64_t count : {0, 1, 7, 64, 65, 1009}) {
    check<float, Sum>(world, ReduceOp::kSum, count, true);
    check<BFloat16, Sum>(world, ReduceOp::kSum, count, true);
    check<int32_t, Max>(world, ReduceOp::kMax, count, true);
  }
  check<float, Mean>(world, ReduceOp::kMean, 100, true);
}

TEST_P(BlockShim, SumsInRankOrderWhereItIsPromised) {
  const auto [algorithm, world_size] = GetParam();
  if (!info_of(algorithm).rank_order) GTEST_SKIP() << "another order";
  ShimWorld world(world_size);
  check<float, Sum>(world, ReduceOp::kSum, 500, false);
  check<BFloat16, Mean>(world, ReduceOp::kMean, 500, false);
}

TEST_P(BlockShim, StopsAtTheDeadlineAndNamesThePeer) {
  const auto [algorithm, world_size] = GetParam();
  ShimWorld world(world_size);
  world.timeout_ns = 50'000'000;
  const auto inputs = random_inputs<float>(world_size, 2000, true, 1);
  auto outputs = inputs;
  const int absent = world_size - 1;
  const int stopped = world.allreduce<float, Sum>(algorithm, inputs, outputs, absent);
  EXPECT_EQ(stopped, (world_size - 1) * channels_of(algorithm));
  EXPECT_NE(world.status, 0u);
  if (world_size == 2) {
    EXPECT_EQ(world.status, stopped_status(0, absent));
  }
}

TEST_P(BlockShim, StopsWhenAborted) {
  const auto [algorithm, world_size] = GetParam();
  ShimWorld world(world_size);
  std::atomic_ref(world.abort).store(1);
  const auto inputs = random_inputs<float>(world_size, 2000, true, 1);
  auto outputs = inputs;
  const int stopped = world.allreduce<float, Sum>(algorithm, inputs, outputs, world_size - 1);
  EXPECT_EQ(stopped, (world_size - 1) * channels_of(algorithm));
}

std::vector<Algorithm> algorithms() {
  std::vector<Algorithm> result;
  for (const AlgorithmInfo& info : kAlgorithms) {
    if (info.algorithm != Algorithm::kAuto) result.push_back(info.algorithm);
  }
  return result;
}

INSTANTIATE_TEST_SUITE_P(Worlds, BlockShim,
                         ::testing::Combine(::testing::ValuesIn(algorithms()),
                                            ::testing::Range(2, 6)),
                         [](const auto& info) {
                           return std::string(info_of(std::get<0>(info.param)).name) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

}  // namespace
}  // namespace jaxring::testing
