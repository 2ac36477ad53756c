// 128 ranks in one process, driven by one thread: right values, and hops and bytes of every rank as
// counted beforehand.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "xla_ffi/algorithms/counting.h"
#include "xla_ffi/core/host_layout.h"
#include "xla_ffi/host/executor.h"
#include "xla_ffi/transport/in_process.h"

namespace jaxring {
namespace {

constexpr int kRanks = 128;
constexpr int64_t kChunkElements = 1000;  // smaller than a slot: a message is one slice

// Counts the messages that each rank sends and receives: a notice goes out for either.
class CountingConnections final : public Connections {
 public:
  Sender& sender(int from, int to, int channel) override {
    return fifos_.sender(from, to, channel);
  }
  Receiver& receiver(int from, int to, int channel) override {
    return fifos_.receiver(from, to, channel);
  }
  void notify(int /*rank*/) override { ++messages[current]; }

  int current = 0;  // whose pipeline is being advanced
  std::vector<int64_t> messages = std::vector<int64_t>(kRanks);

 private:
  InProcessTransport fifos_{kRanks};
};

class LargeWorld : public ::testing::TestWithParam<std::tuple<Collective, Algorithm>> {};

TEST_P(LargeWorld, MovesWhatWasCounted) {
  const auto [collective, algorithm] = GetParam();
  // Blocks are of equal size.
  const int64_t count = kRanks * 96 + (collective == Collective::kAllreduce ? 5 : 0);
  std::vector<int> hosts(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) hosts[rank] = rank / 8;
  const HostLayout layout(hosts);
  const Work work{collective, Range{0, count}};

  std::vector<std::vector<float>> inputs(kRanks, std::vector<float>(count));
  std::vector<std::vector<float>> outputs(kRanks, std::vector<float>(count));
  std::vector<float> expected(count);
  std::vector<Input> input(kRanks);
  std::vector<Output> output(kRanks);
  CountingConnections connections;
  std::vector<std::unique_ptr<Pipeline>> pipelines;
  for (int rank = 0; rank < kRanks; ++rank) {
    const Range in = input_range(collective, work.message, kRanks, rank);
    const Range out = output_range(collective, work.message, kRanks, rank);
    for (int64_t i = 0; i < count; ++i) {
      inputs[rank][i] = static_cast<float>((rank * 3 + i) % 17);
      const bool mine = i >= in.offset && i < in.offset + in.count;
      if (mine) expected[i] += inputs[rank][i];
    }
    input[rank].begin_at(in.offset);
    input[rank].add(inputs[rank].data() + in.offset, in.count);
    output[rank].begin_at(out.offset);
    output[rank].add(outputs[rank].data() + out.offset, out.count);
    for (int channel = 0; channel < channels_of(algorithm, work.collective); ++channel) {
      PlanPrims prims;
      run_schedule(algorithm, channel, prims, World{rank, kRanks, kChunkElements, &layout}, work);
      pipelines.push_back(std::make_unique<Pipeline>(
          rank, channel, Arithmetic{DType::kFloat32, ReduceOp::kSum, kRanks}, kFifoSlotBytes / 4,
          &input[rank], &output[rank], prims.take(), connections));
    }
  }
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& pipeline : pipelines) {
      connections.current = pipeline->rank();
      moved |= pipeline->advance();
    }
  }
  std::vector<Traffic> traffic(kRanks);
  for (auto& pipeline : pipelines) {
    EXPECT_TRUE(pipeline->finished()) << "rank " << pipeline->rank();
    traffic[pipeline->rank()].bytes_sent += pipeline->traffic().bytes_sent;
    traffic[pipeline->rank()].bytes_received += pipeline->traffic().bytes_received;
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    CountingPrims counted;
    for (int channel = 0; channel < channels_of(algorithm, work.collective); ++channel) {
      run_schedule(algorithm, channel, counted, World{rank, kRanks, kChunkElements, &layout}, work);
    }
    const Range out = output_range(collective, work.message, kRanks, rank);
    for (int64_t i = out.offset; i < out.offset + out.count; ++i) {
      ASSERT_EQ(outputs[rank][i], expected[i]) << "element " << i << " of rank " << rank;
    }
    EXPECT_EQ(connections.messages[rank], counted.messages_sent() + counted.messages_received());
    EXPECT_EQ(traffic[rank].bytes_sent, counted.bytes_sent(4, 4));
    EXPECT_EQ(traffic[rank].bytes_received, counted.bytes_received(4, 4));
  }
}

std::string name_of_case(const ::testing::TestParamInfo<LargeWorld::ParamType>& info) {
  const auto [collective, algorithm] = info.param;
  return std::string(name_of(collective)) + "_" + std::string(info_of(algorithm).name);
}

INSTANTIATE_TEST_SUITE_P(
    Allreduce, LargeWorld,
    ::testing::Combine(::testing::Values(Collective::kAllreduce),
                       ::testing::Values(Algorithm::kRing, Algorithm::kTree,
                                         Algorithm::kHalvingDoubling, Algorithm::kChain,
                                         Algorithm::kReducer, Algorithm::kDirect,
                                         Algorithm::kHierarchical)),
    name_of_case);

INSTANTIATE_TEST_SUITE_P(Halves, LargeWorld,
                         ::testing::Combine(::testing::Values(Collective::kReduceScatter,
                                                              Collective::kAllGather),
                                            ::testing::Values(Algorithm::kRing, Algorithm::kDirect,
                                                              Algorithm::kHierarchical)),
                         name_of_case);

}  // namespace
}  // namespace jaxring
