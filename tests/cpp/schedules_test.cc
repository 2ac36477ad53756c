// Every schedule x world size x count x op x dtype x layout against a reference, with what moved.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "world.h"
#include "xla_ffi/algorithms/counting.h"
#include "xla_ffi/host/reduce_kernels.h"

namespace jaxring::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

constexpr Algorithm kAll[] = {Algorithm::kDirect, Algorithm::kRing, Algorithm::kTree,
                              Algorithm::kReducer};

// Values whose sums, products and roundings are exact in every dtype: the order of folding cannot
// show, so one reference serves all schedules. Distinct per rank and position.
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
  // Sanitizers look at accesses, not at values: a third of the worlds and the sizes around a slot
  // do.
  if (kSanitized && world_size % 3 != 2) return;
  TestWorld world(layout, world_size);
  uint64_t run_id = 1;
  const int64_t slot = kFifoSlotBytes / 4;  // elements of a slot that holds float32
  std::vector<int64_t> counts = {0, 1, 2, 7, 1009, slot - 1, slot, slot + 1};
  if (!kSanitized) counts.push_back(131071);
  for (Algorithm algorithm : kAll) {
    std::vector<int64_t> sizes = counts;
    // 1 M elements: every dtype and op on one algorithm per world, so that all meet within four
    // worlds.
    if (!kSanitized && algorithm == kAll[world_size % 4]) sizes.push_back(1 << 20);
    for (int64_t count : sizes) {
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

// Baidu's claim, measured: what one rank of a ring moves does not grow with the number of ranks
// (but for the fraction (p-1)/p), what the reducer moves does. Each rank is a process here, so that
// the engine's counters are those of one rank; they must equal the counted schedule, and both the
// formulas.
TEST(Traffic, EqualsTheFormulasOnEveryRank) {
  const int64_t count = 720720;  // divisible by every world size below
  const int64_t n = count * 4;
  std::printf("sent + received by the busiest rank, in units of the message (n = %.1f MB)\n",
              n / 1e6);
  std::printf("%3s %8s %8s %8s %8s\n", "p", "direct", "ring", "tree", "reducer");
  for (int p = 2; p <= (kSanitized ? 3 : 16); ++p) {
    TestWorld world(Layout::kProcesses, p);
    std::printf("%3d", p);
    uint64_t run_id = 1;
    for (Algorithm algorithm : kAll) {
      check<float>(world, algorithm, ReduceOp::kSum, count, run_id++);
      int64_t all_sent = 0, busiest = 0;
      for (int rank = 0; rank < p; ++rank) {
        CountingPrims counted;
        for (int channel = 0; channel < channels_of(algorithm); ++channel) {
          run_allreduce(algorithm, channel, counted, World{rank, p, 65536}, Range{0, count});
        }
        const StatsRow row = world.of_rank(rank).stats(true).at(0);
        const std::string where = std::string(info_of(algorithm).name) + " p=" + std::to_string(p) +
                                  " rank " + std::to_string(rank);
        EXPECT_EQ(row.operations, 1) << where;
        EXPECT_EQ(row.bytes_sent, counted.bytes_sent(4, 4)) << where;
        EXPECT_EQ(row.bytes_received, counted.bytes_received(4, 4)) << where;
        switch (algorithm) {
          case Algorithm::kReducer:
            EXPECT_EQ(row.bytes_received, rank == 0 ? (p - 1) * n : n) << where;
            EXPECT_EQ(row.bytes_sent, row.bytes_received) << where;
            break;
          case Algorithm::kTree:  // inner node of one half, leaf of the other
            EXPECT_LE(row.bytes_sent + row.bytes_received, 4 * n) << where;
            break;
          default:
            EXPECT_EQ(row.bytes_sent, 2 * (p - 1) * n / p) << where;
            EXPECT_EQ(row.bytes_received, 2 * (p - 1) * n / p) << where;
        }
        all_sent += row.bytes_sent;
        busiest = std::max(busiest, row.bytes_sent + row.bytes_received);
      }
      EXPECT_EQ(all_sent, 2 * (p - 1) * n) << info_of(algorithm).name << " p=" << p;
      std::printf(" %8.3f", static_cast<double>(busiest) / n);
    }
    std::printf("\n");
  }
}

}  // namespace
}  // namespace jaxring::testing
