// Every schedule x world size x count x op x dtype x layout against a reference, with what moved.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "xla_ffi/algorithms/counting.h"
#include "xla_ffi/host/reduce_kernels.h"
#include "world.h"

namespace jaxring::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

constexpr Algorithm kAll[] = {Algorithm::kDirect, Algorithm::kRing, Algorithm::kTree,
                              Algorithm::kReducer};

// Values whose sums, products and roundings are exact in every dtype: the order of folding cannot show, so
// one reference serves all schedules. Distinct per rank and position.
template <typename T>
std::vector<T> inputs_of(int rank, int64_t count, ReduceOp op) {
  std::vector<AccumulatorOf<T>> exact(count);
  for (int64_t i = 0; i < count; ++i) {
    exact[i] = op == ReduceOp::kProd ? ((rank + i) % 7 == 0 ? 2 : 1) : (rank * 5 + i * 3) % 13 - 4;
  }
  std::vector<T> values(count);
  const Operand operand{exact.data(), true};
  fold(DTypeTraits<T>::dtype, ReduceOp::kMax, &operand, 1, values.data(), false, count, 1);
  return values;
}

// The reference: one fold over all inputs in rank order, whose own test is reduce_kernels_test.
template <typename T>
std::vector<T> expected_of(int world_size, int64_t count, ReduceOp op) {
  std::vector<std::vector<T>> inputs;
  std::vector<Operand> operands;
  for (int rank = 0; rank < world_size; ++rank) inputs.push_back(inputs_of<T>(rank, count, op));
  for (auto& input : inputs) operands.push_back(Operand{input.data(), false});
  std::vector<T> result(count);
  fold(DTypeTraits<T>::dtype, op, operands.data(), world_size, result.data(), false, count,
       world_size);
  return result;
}

template <typename T>
void check(TestWorld& world, Algorithm algorithm, ReduceOp op, int64_t count, uint64_t run_id) {
  const int n = world.world_size();
  const auto info = make_info(algorithm, op, DTypeTraits<T>::dtype, count);
  std::vector<std::vector<T>> outputs(n, std::vector<T>(count));
  world.spawn([&](int rank) {
    std::vector<T> input = inputs_of<T>(rank, count, op);
    const std::vector<T> before = input;
    Request request;
    request.info = info;
    request.rank = rank;
    request.run_id = run_id;
    // Two leaves, so that slices cross a boundary between arrays.
    request.input.add(input.data(), count / 3);
    request.input.add(input.data() + count / 3, count - count / 3);
    request.output.add(outputs[rank].data(), count / 3);
    request.output.add(outputs[rank].data() + count / 3, count - count / 3);
    const std::optional<Error> error =
        Submitted::start(world.of_rank(rank), std::move(request)).error();
    EXPECT_FALSE(error) << error->text();
    EXPECT_EQ(0, std::memcmp(input.data(), before.data(), count * sizeof(T)));
  });
  const std::vector<T> expected = expected_of<T>(n, count, op);
  for (int rank = 0; rank < n; ++rank) {
    ASSERT_EQ(0, std::memcmp(outputs[rank].data(), expected.data(), count * sizeof(T)))
        << "rank " << rank << " of " << n << ", " << info_of(algorithm).name << ", " << count
        << " x " << name_of(DTypeTraits<T>::dtype) << " " << name_of(op);
  }
}

template <typename T>
void check_ops(TestWorld& world, Algorithm algorithm, int64_t count, uint64_t* run_id) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax}) {
    if (supports(op, DTypeTraits<T>::dtype)) check<T>(world, algorithm, op, count, (*run_id)++);
  }
}

class Schedules : public ::testing::TestWithParam<std::tuple<Layout, int>> {};

TEST_P(Schedules, EqualTheReference) {
  const auto [layout, world_size] = GetParam();
  // Sanitizers look at accesses, not at values: a third of the worlds and the sizes around a slot do.
  if (kSanitized && world_size % 3 != 2) return;
  TestWorld world(layout, world_size);
  uint64_t run_id = 1;
  const int64_t slot = kFifoSlotBytes / 4;  // elements of a slot that holds float32
  std::vector<int64_t> counts = {0, 1, 2, 7, 1009, slot - 1, slot, slot + 1};
  if (!kSanitized) counts.push_back(131071);
  for (Algorithm algorithm : kAll) {
    for (int64_t count : counts) {
      if (count > 1009 && kSanitized) {
        check<float>(world, algorithm, ReduceOp::kSum, count, run_id++);
        continue;
      }
      check_ops<float>(world, algorithm, count, &run_id);
      check_ops<double>(world, algorithm, count, &run_id);
      check_ops<BFloat16>(world, algorithm, count, &run_id);
      check_ops<Float16>(world, algorithm, count, &run_id);
      check_ops<int32_t>(world, algorithm, count, &run_id);
    }
    if (!kSanitized) check<float>(world, algorithm, ReduceOp::kSum, 1 << 20, run_id++);
    EXPECT_EQ(world.total(true).algorithm, info_of(algorithm).name);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Schedules,
                         ::testing::Combine(::testing::Values(Layout::kDevices, Layout::kProcesses,
                                                              Layout::kTwoDevicesPerProcess),
                                            ::testing::Range(1, 10)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// Baidu's claim: what one rank of a ring moves does not grow with the number of ranks; what the reducer
// moves does. Measured by the engine, compared with the formula and with the counted schedule.
TEST(Traffic, EqualsTheFormulas) {
  const int64_t count = 720720;  // divisible by every world size below
  const int64_t n = count * 4;
  for (int p = 2; p <= (kSanitized ? 3 : 16); ++p) {
    TestWorld world(Layout::kDevices, p);
    uint64_t run_id = 1;
    for (Algorithm algorithm : kAll) {
      check<float>(world, algorithm, ReduceOp::kSum, count, run_id++);
      const StatsRow total = world.total(true);
      int64_t counted = 0;
      for (int rank = 0; rank < p; ++rank) {
        CountingPrims prims;
        const World view{rank, p, 65536};
        for (int channel = 0; channel < info_of(algorithm).channels; ++channel) {
          run_allreduce(algorithm, channel, prims, view, Range{0, count});
        }
        counted += prims.bytes_sent(4, 4);
        if (algorithm == Algorithm::kRing || algorithm == Algorithm::kDirect) {
          EXPECT_EQ(prims.bytes_sent(4, 4), 2 * (p - 1) * n / p);
          EXPECT_EQ(prims.bytes_received(4, 4), 2 * (p - 1) * n / p);
        }
        if (algorithm == Algorithm::kReducer) {
          EXPECT_EQ(prims.bytes_received(4, 4), rank == 0 ? (p - 1) * n : n);
        }
        if (algorithm == Algorithm::kTree) {
          EXPECT_LE(prims.bytes_sent(4, 4), 5 * n / 2);
        }
      }
      EXPECT_EQ(counted, 2 * (p - 1) * n) << info_of(algorithm).name << " p=" << p;
      EXPECT_EQ(total.bytes_sent, counted) << info_of(algorithm).name << " p=" << p;
      EXPECT_EQ(total.bytes_received, counted) << info_of(algorithm).name << " p=" << p;
      EXPECT_EQ(total.operations, p);
    }
  }
}

}  // namespace
}  // namespace jaxring::testing
