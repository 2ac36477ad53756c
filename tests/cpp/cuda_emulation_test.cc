// The CUDA kernels' own source, run by host threads: 2 to 9 ranks of 1 to 4 blocks of 1 to 4
// threads. Every road of every collective, in random succession on one arena, since what one call
// leaves is what the next one finds. Under ThreadSanitizer it sees races whose results happen to be
// right; tests/cuda/mutations.py shows that it does.
#include <functional>

#include "cuda_reference.h"

namespace jaxring::testing {
namespace {

using Types = cuda::DTypeList<float, BFloat16, Float8E4M3Fn, int32_t>;

// Calls of several element types, run in a row.
class Session {
 public:
  Session(int world_size, int blocks, int threads, int seed)
      : world_(world_size, blocks, threads), world_size_(world_size), random_(seed) {}

  template <typename T>
  void add(const Road& road, ReduceOp op, int64_t piece, int late_rank = -1, int slow_reader = -1) {
    auto call = std::make_shared<TypedCall<T>>(road, op, world_size_, piece, random_);
    if (!world_.serves(call->emulated.call)) return;  // no channel or no room for packets
    call->emulated.late_rank = late_rank;
    call->emulated.slow_reader = slow_reader;
    calls_.push_back(std::move(call->emulated));
    checks_.push_back([call](EmulatedCall& done) { call->check(done); });
  }
  void add_one(const Road& road, int64_t piece) {
    if (road.method == cuda::Method::kMultimem && piece % 2 == 1) {  // what switches can sum
      if (random_() % 2 == 0) return add<BFloat16>(road, ReduceOp::kSum, piece);
      return add<float>(road, ReduceOp::kMean, piece);
    }
    if (!reduces(road.collective) || piece % 2 == 0) return add<float>(road, ReduceOp::kSum, piece);
    switch (random_() % 4) {
      case 0:
        return add<BFloat16>(road, ReduceOp::kMean, piece);
      case 1:
        return add<int32_t>(road, ReduceOp::kMax, piece);
      case 2:
        return add<Float8E4M3Fn>(road, ReduceOp::kMin, piece);
      default:
        return add<float>(road, ReduceOp::kSum, piece);
    }
  }

  void run() {
    world_.run<Types>(calls_);
    for (int rank = 0; rank < world_size_; ++rank) {
      ASSERT_EQ(world_.statuses[rank], 0u)
          << "rank " << rank << " gave up on rank " << cuda::peer_in(world_.statuses[rank]);
    }
    for (size_t i = 0; i < calls_.size(); ++i) {
      checks_[i](calls_[i]);
      if (::testing::Test::HasFatalFailure()) return;
    }
    calls_.clear();
    checks_.clear();
  }

  size_t size() const { return calls_.size(); }
  EmulatedWorld& world() { return world_; }
  std::mt19937& random() { return random_; }

 private:
  EmulatedWorld world_;
  const int world_size_;
  std::mt19937 random_;
  std::deque<EmulatedCall> calls_;
  std::vector<std::function<void(EmulatedCall&)>> checks_;
};

// Elements of float: a slot holds 32 (and partial bfloat16 too), a block's staging 128.
constexpr int64_t kSizes[] = {0, 1, 31, 32, 33, 257, 700};

class CudaEmulation : public ::testing::TestWithParam<std::tuple<int, int, int>> {};

TEST_P(CudaEmulation, EveryRoadGivesTheReference) {
  const auto [world_size, blocks, threads] = GetParam();
  Session session(world_size, blocks, threads, world_size);
  std::vector<std::pair<Road, int64_t>> plan;
  for (const Road& road : all_roads()) {
    for (const int64_t size : kSizes) plan.emplace_back(road, size);
  }
  std::shuffle(plan.begin(), plan.end(), session.random());
  for (const auto& [road, size] : plan) session.add_one(road, size);
  const uint64_t calls = session.size();
  session.run();
  for (int rank = 0; rank < world_size; ++rank) {  // what the host reads for jaxring.stats()
    const cuda::CallLog& log = *session.world().arena(rank).log();
    EXPECT_EQ(log.begun, calls);
    EXPECT_EQ(log.ended, calls);
    EXPECT_EQ(log.ended_at[0], calls);
  }
}

std::string name_of_world(const ::testing::TestParamInfo<std::tuple<int, int, int>>& info) {
  const auto [ranks, blocks, threads] = info.param;
  return std::to_string(ranks) + "x" + std::to_string(blocks) + "x" + std::to_string(threads);
}

// Ranks from 2 to 9, blocks and threads from 1 to 4: each pair of them occurs.
INSTANTIATE_TEST_SUITE_P(Worlds, CudaEmulation,
                         ::testing::Values(std::tuple(2, 1, 1), std::tuple(2, 4, 3),
                                           std::tuple(2, 3, 2), std::tuple(3, 2, 3),
                                           std::tuple(3, 1, 4), std::tuple(4, 3, 1),
                                           std::tuple(4, 1, 3), std::tuple(5, 2, 2),
                                           std::tuple(5, 4, 1), std::tuple(6, 1, 2),
                                           std::tuple(6, 2, 4), std::tuple(7, 3, 3),
                                           std::tuple(8, 2, 1), std::tuple(8, 4, 4),
                                           std::tuple(9, 3, 4), std::tuple(9, 4, 2)),
                         name_of_world);

// The same road many times: a fast rank is then as far ahead as the protocol allows.
TEST(CudaEmulationRepeats, KeepsRanksApart) {
  Session session(3, 2, 3, 1);
  for (const Road& road : all_roads()) {
    for (int i = 0; i < 12; ++i) session.add_one(road, i % 3 == 0 ? 10 : 64);
    for (int i = 0; i < 3; ++i) session.add_one(road, 1500);
  }
  session.run();
}

// Two ranks and traffic one way only: nothing but the FIFO's own counters orders them.
TEST(CudaEmulationRepeats, OneWay) {
  Session session(2, 2, 2, 2);
  for (int i = 0; i < 6; ++i) {
    session.add<float>({Collective::kBroadcast, Algorithm::kTree, cuda::Method::kBySize},
                       ReduceOp::kSum, 3000);
  }
  session.run();
}

// A rank has sent its packets, so that its peers go on, and only then looks for theirs.
TEST(CudaEmulationRepeats, PacketsOfTheNextEpochSpareThose) {
  const Road road{Collective::kAllreduce, Algorithm::kDirect, cuda::Method::kPackets};
  Session session(3, 1, 2, 4);
  for (int i = 0; i < 12; ++i) session.add<float>(road, ReduceOp::kSum, 60, -1, i % 4);
  session.run();
}

// 2^32 epochs on, flags are the same again: packets of then must not pass for new ones.
TEST(CudaEmulationRepeats, PacketFlagsComeRound) {
  constexpr int kRanks = 2;
  const Road road{Collective::kAllreduce, Algorithm::kDirect, cuda::Method::kPackets};
  Session session(kRanks, 1, 2, 3);
  for (int i = 0; i < 5; ++i) session.add<float>(road, ReduceOp::kSum, 60);
  session.run();
  for (int rank = 0; rank < kRanks; ++rank) {
    session.world().arena(rank).state(0)->packets = (uint64_t{1} << 32) - 1;
  }
  for (int i = 0; i < 4; ++i) session.add<float>(road, ReduceOp::kSum, 1);
  for (int i = 0; i < 2; ++i) session.add<float>(road, ReduceOp::kSum, 60, i);
  session.run();
}

}  // namespace

}  // namespace jaxring::testing
