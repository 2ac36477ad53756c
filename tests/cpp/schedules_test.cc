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

constexpr Algorithm kAll[] = {Algorithm::kDirect,          Algorithm::kRing,  Algorithm::kTree,
                              Algorithm::kHalvingDoubling, Algorithm::kChain, Algorithm::kReducer,
                              Algorithm::kHierarchical};
constexpr int kAllCount = sizeof(kAll) / sizeof(kAll[0]);

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
class CheckOf final : public Check {
 public:
  CheckOf(int world_size, Algorithm algorithm, ReduceOp op, int64_t count, uint64_t run_id)
      : info_(make_info(algorithm, op, DTypeTraits<T>::dtype, count)),
        count_(count),
        run_id_(run_id),
        outputs_(world_size, std::vector<T>(count)) {}

  void run(TestWorld& world, int rank) override {
    std::vector<T> input = inputs_of<T>(rank, count_, info_->op);
    const std::vector<T> before = input;
    Request request;
    request.info = info_;
    request.rank = rank;
    request.run_id = run_id_;
    // Two leaves, so that slices cross a boundary between arrays.
    request.input.add(input.data(), count_ / 3);
    request.input.add(input.data() + count_ / 3, count_ - count_ / 3);
    request.output.add(outputs_[rank].data(), count_ / 3);
    request.output.add(outputs_[rank].data() + count_ / 3, count_ - count_ / 3);
    const std::optional<Error> error =
        Submitted::start(world.of_rank(rank), std::move(request)).error();
    EXPECT_FALSE(error) << error->text();
    EXPECT_EQ(0, std::memcmp(input.data(), before.data(), count_ * sizeof(T)));
  }

  void verify() const override {
    const int n = static_cast<int>(outputs_.size());
    const std::vector<T> expected = expected_of<T>(n, count_, info_->op);
    for (int rank = 0; rank < n; ++rank) {
      ASSERT_EQ(0, std::memcmp(outputs_[rank].data(), expected.data(), count_ * sizeof(T)))
          << "rank " << rank << " of " << n << ", " << info_of(info_->algorithm).name << ", "
          << count_ << " x " << name_of(DTypeTraits<T>::dtype) << " " << name_of(info_->op);
    }
  }

 private:
  const std::shared_ptr<const CallInfo> info_;
  const int64_t count_;
  const uint64_t run_id_;
  std::vector<std::vector<T>> outputs_;
};

template <typename T>
void add(Checks& checks, int world_size, Algorithm algorithm, ReduceOp op, int64_t count,
         uint64_t* run_id) {
  if (!supports(op, DTypeTraits<T>::dtype)) return;
  checks.push_back(std::make_unique<CheckOf<T>>(world_size, algorithm, op, count, (*run_id)++));
}

// Every dtype and op.
void add_product(Checks& checks, int world_size, Algorithm algorithm, int64_t count,
                 uint64_t* run_id) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax}) {
    add<float>(checks, world_size, algorithm, op, count, run_id);
    add<double>(checks, world_size, algorithm, op, count, run_id);
    add<BFloat16>(checks, world_size, algorithm, op, count, run_id);
    add<Float16>(checks, world_size, algorithm, op, count, run_id);
    add<int32_t>(checks, world_size, algorithm, op, count, run_id);
  }
}

// Each op and four dtypes once, for sizes that cost more than they tell.
void add_selection(Checks& checks, int world_size, Algorithm algorithm, int64_t count,
                   uint64_t* run_id) {
  add<float>(checks, world_size, algorithm, ReduceOp::kSum, count, run_id);
  add<BFloat16>(checks, world_size, algorithm, ReduceOp::kMean, count, run_id);
  add<int32_t>(checks, world_size, algorithm, ReduceOp::kMax, count, run_id);
  add<double>(checks, world_size, algorithm, ReduceOp::kMin, count, run_id);
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
    // 1 M elements: every dtype and op on one algorithm per world, so that all meet within six
    // worlds.
    if (!kSanitized && algorithm == kAll[world_size % kAllCount]) sizes.push_back(1 << 20);
    for (int64_t count : sizes) {
      Checks checks;
      if (count > 1009 && kSanitized) {
        add<float>(checks, world_size, algorithm, ReduceOp::kSum, count, &run_id);
      } else if (count > 1009 && count != slot + 1 && count < (1 << 20)) {
        add_selection(checks, world_size, algorithm, count, &run_id);
      } else {
        add_product(checks, world_size, algorithm, count, &run_id);
      }
      run_all(world, checks);
    }
    EXPECT_EQ(world.total(true).algorithm, info_of(algorithm).name);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Schedules,
                         ::testing::Combine(::testing::ValuesIn(all_layouts()),
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
  const int64_t count = 72000;  // divisible by every world size below
  const int64_t n = count * 4;
  std::printf("sent + received by the busiest rank, in units of the message (n = %.1f MB)\n",
              n / 1e6);
  std::printf("%3s", "p");
  for (Algorithm algorithm : kAll) std::printf(" %16s", info_of(algorithm).name.data());
  std::printf("\n");
  for (int p : {2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16}) {
    if (kSanitized && p > 3) break;
    TestWorld world(Layout::kProcesses, p);
    std::printf("%3d", p);
    uint64_t run_id = 1;
    for (Algorithm algorithm : kAll) {
      Checks checks;
      add<float>(checks, p, algorithm, ReduceOp::kSum, count, &run_id);
      run_all(world, checks);
      int64_t all_sent = 0, busiest = 0;
      for (int rank = 0; rank < p; ++rank) {
        CountingPrims counted;
        const Work work{Collective::kAllreduce, Range{0, count}};
        for (int channel = 0; channel < channels_of(algorithm, work.collective); ++channel) {
          run_schedule(algorithm, channel, counted, World{rank, p, 65536}, work);
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
          case Algorithm::kHalvingDoubling: {  // a corner that two ranks share works for both
            const int64_t corners = Hypercube(rank, p).corners;
            const int64_t once = 2 * (corners - 1) * n / corners;
            EXPECT_LE(row.bytes_sent, once + (corners == p ? 0 : n)) << where;
            break;
          }
          case Algorithm::kChain:
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
      std::printf(" %16.3f", static_cast<double>(busiest) / n);
    }
    std::printf("\n");
  }
}

}  // namespace
}  // namespace jaxring::testing
