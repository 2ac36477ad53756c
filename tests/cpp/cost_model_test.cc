#include "xla_ffi/algorithms/cost_model.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "xla_ffi/algorithms/counting.h"
#include "xla_ffi/algorithms/select.h"

namespace jaxring {
namespace {

constexpr int64_t kElements = 1 << 20;  // float32, one chunk
constexpr double kBytes = 4.0 * kElements;

// What the schedule itself sends, by the busiest rank.
double counted_bytes(Algorithm algorithm, Collective collective, int world_size) {
  int64_t most = 0;
  for (int rank = 0; rank < world_size; ++rank) {
    int64_t sent = 0;
    for (int channel = 0; channel < channels_of(algorithm, collective); ++channel) {
      CountingPrims prims;
      run_schedule(algorithm, channel, prims, World{rank, world_size, kElements},
                   Work{collective, Range{0, kElements}, 0});
      sent += prims.bytes_sent(4, 4);
    }
    most = std::max(most, sent);
  }
  return static_cast<double>(most);
}

TEST(CostModel, SendsWhatTheSchedulesSend) {
  for (const AlgorithmInfo& info : kAlgorithms) {
    if (info.algorithm == Algorithm::kAuto) continue;
    for (Collective collective : {Collective::kAllreduce, Collective::kReduceScatter,
                                  Collective::kAllGather, Collective::kBroadcast}) {
      if (!serves(info.algorithm, collective)) continue;
      for (int world_size : {2, 4, 8, 16}) {
        const double counted = counted_bytes(info.algorithm, collective, world_size);
        const double modelled =
            expense_of(info.algorithm, collective, world_size, kBytes).sent_bytes;
        // The busiest rank of a tree or chain may have fewer neighbours than its model, in small
        // worlds.
        const bool tree = info.algorithm == Algorithm::kTree || info.algorithm == Algorithm::kChain;
        EXPECT_GE(modelled / counted, 0.99)
            << info.name << " " << name_of(collective) << " " << world_size;
        EXPECT_LE(modelled / counted, tree ? 2.01 : 1.01)
            << info.name << " " << name_of(collective) << " " << world_size;
      }
    }
  }
}

TEST(CostModel, ChoosesByWorldAndSize) {
  auto choose = [](Collective collective, int world_size, double bytes, bool ordered = false) {
    return cheapest(collective, ordered, world_size, bytes, kSharedMemoryCosts);
  };
  for (double bytes : {64e3, 1e6, 64e6}) {
    EXPECT_EQ(choose(Collective::kAllreduce, 4, bytes), Algorithm::kDirect);
    EXPECT_EQ(choose(Collective::kAllGather, 8, bytes), Algorithm::kDirect);
  }
  EXPECT_EQ(choose(Collective::kAllreduce, 128, 64e3), Algorithm::kTree);
  EXPECT_EQ(choose(Collective::kAllreduce, 128, 16e6), Algorithm::kHalvingDoubling);
  EXPECT_EQ(choose(Collective::kAllreduce, 128, 64e3, true), Algorithm::kDirect);
  EXPECT_EQ(choose(Collective::kBroadcast, 2, 64e6), Algorithm::kDirect);
  EXPECT_EQ(choose(Collective::kBroadcast, 8, 64e6), Algorithm::kTree);
  EXPECT_EQ(choose(Collective::kReduce, 8, 64e6, true), Algorithm::kDirect);
}

TEST(Select, OneProcessAndSmallMessagesAreDirect) {
  Criteria call{Collective::kBroadcast, Algorithm::kAuto, false, 1, 1 << 24, 4, 4, 0};
  EXPECT_EQ(select(call).algorithm, Algorithm::kDirect);
  EXPECT_FALSE(select(call).one_shot);
  call.process_count = 16;
  EXPECT_EQ(select(call).algorithm, Algorithm::kTree);
  call.count = 1000;
  EXPECT_TRUE(select(call).one_shot);
}

}  // namespace
}  // namespace jaxring
