// The hierarchical schedules on worlds whose ranks are told that they are on several hosts: values
// against the reference, and what crosses each host's link.
#include "xla_ffi/algorithms/hierarchical.h"

#include <gtest/gtest.h>

#include "world.h"
#include "xla_ffi/algorithms/counting.h"
#include "xla_ffi/algorithms/select.h"

namespace jaxring::testing {
namespace {

// Hosts by rank: even, uneven, one with one rank, dealt out in turn.
const std::vector<std::vector<int>> kLayouts = {
    {0, 0, 1, 1},          {0, 0, 0, 1},    {0, 1, 1, 1, 2, 2}, {0, 1, 0, 1, 0, 1},
    {0, 0, 1, 1, 2, 2, 3}, {0, 1, 2, 3, 3}, {0, 0, 0},          {0, 0, 1, 1, 0, 1, 1}};

// Counts what a rank sends to other hosts, and receives from them.
class CrossingPrims : public Verbs<CrossingPrims> {
 public:
  CrossingPrims(int rank, const HostLayout& layout) : rank_(rank), layout_(layout) {}
  void step(Peers from, Peers to, Range range, Own /*own*/, Into /*into*/) {
    sent += range.count * elsewhere(to);
    received += range.count * elsewhere(from);
  }
  int64_t sent = 0, received = 0;

 private:
  int elsewhere(Peers peers) const {
    int count = 0;
    for (int i = 0; i < peers.count(); ++i) {
      count += layout_.host_of[peers[i]] != layout_.host_of[rank_];
    }
    return count;
  }
  const int rank_;
  const HostLayout& layout_;
};

struct Crossing {
  int64_t sent = 0, received = 0;
};

// By host.
std::vector<Crossing> crossing(const HostLayout& layout, Collective collective, int64_t count) {
  std::vector<Crossing> crossing(layout.host_count());
  const int world_size = static_cast<int>(layout.host_of.size());
  for (int rank = 0; rank < world_size; ++rank) {
    CrossingPrims prims(rank, layout);
    const Work work{collective, Range{0, count}};
    for (int channel = 0; channel < channels_of(Algorithm::kHierarchical, collective); ++channel) {
      run_schedule(Algorithm::kHierarchical, channel, prims,
                   World{rank, world_size, 65536, &layout}, work);
    }
    crossing[layout.host_of[rank]].sent += prims.sent;
    crossing[layout.host_of[rank]].received += prims.received;
  }
  return crossing;
}

TEST(Hierarchical, CrossesEachLinkAsLittleAsARingOfHosts) {
  constexpr int64_t kCount = 4 << 20;
  for (const std::vector<int>& hosts : kLayouts) {
    const HostLayout layout(hosts);
    const double h = layout.host_count();
    for (const Crossing& host : crossing(layout, Collective::kAllreduce, kCount)) {
      EXPECT_NEAR(static_cast<double>(host.sent), 2 * (h - 1) / h * kCount, 0.01 * kCount);
    }
  }
}

// Each block once to each other host: exactly the least that a host must hear in an all_gather, and
// say in a reduce_scatter.
TEST(Hierarchical, CrossesEachLinkWithEachBlockOnce) {
  constexpr int64_t kBlock = 100'003;
  for (const std::vector<int>& hosts : kLayouts) {
    const HostLayout layout(hosts);
    const auto world_size = static_cast<int64_t>(hosts.size());
    const auto gather = crossing(layout, Collective::kAllGather, world_size * kBlock);
    const auto scatter = crossing(layout, Collective::kReduceScatter, world_size * kBlock);
    for (int host = 0; host < layout.host_count(); ++host) {
      const auto here = static_cast<int64_t>(layout.ranks[host].size());
      const int64_t of_others = (world_size - here) * kBlock;
      const int64_t to_others = (layout.host_count() - 1) * here * kBlock;
      EXPECT_EQ(gather[host].received, of_others);
      EXPECT_EQ(gather[host].sent, to_others);
      EXPECT_EQ(scatter[host].sent, of_others);
      EXPECT_EQ(scatter[host].received, to_others);
    }
  }
}

TEST(Hierarchical, AllRanksOfAHostShareItsTraffic) {
  constexpr int64_t kCount = 1 << 20;
  const HostLayout layout({0, 0, 0, 1, 1, 1});
  for (int rank = 0; rank < 6; ++rank) {
    CrossingPrims prims(rank, layout);
    for (int channel = 0; channel < 2; ++channel) {
      run_schedule(Algorithm::kHierarchical, channel, prims, World{rank, 6, 65536, &layout},
                   Work{Collective::kAllreduce, Range{0, kCount}});
    }
    EXPECT_NEAR(static_cast<double>(prims.sent), kCount / 3.0, 100);
  }
  for (Collective collective : {Collective::kAllGather, Collective::kReduceScatter}) {
    for (int rank = 0; rank < 6; ++rank) {
      CrossingPrims prims(rank, layout);
      run_schedule(Algorithm::kHierarchical, 0, prims, World{rank, 6, 65536, &layout},
                   Work{collective, Range{0, 6 * kCount}});
      EXPECT_EQ(prims.sent, kCount);
    }
  }
}

struct Case {
  Collective collective;
  ReduceOp op;
  int64_t count;  // of the message, or of a block
};

// What `rank` should have of the whole message.
std::vector<float> expected_of(const Case& one, int root, int rank,
                               const std::vector<std::vector<float>>& inputs) {
  const auto world_size = static_cast<int>(inputs.size());
  const int64_t count = inputs[0].size();
  std::vector<float> expected(count);
  if (one.collective == Collective::kBroadcast) return inputs[root];
  if (one.collective == Collective::kReduce && rank != root) return expected;
  for (int64_t i = 0; i < count; ++i) {
    if (one.collective == Collective::kAllGather) {
      expected[i] = inputs[i / one.count][i];
    } else {
      for (const auto& input : inputs) expected[i] += input[i];
      if (one.op == ReduceOp::kMean) expected[i] /= static_cast<float>(world_size);
    }
  }
  return expected;
}

void expect_right(TestWorld& world, const Case& one, uint64_t run_id) {
  const int world_size = world.world_size();
  CallInfo call;
  call.collective = one.collective;
  call.op = one.op;
  call.algorithm = Algorithm::kHierarchical;
  call.root = static_cast<int>(run_id) % world_size;
  const bool blocks =
      one.collective == Collective::kAllGather || one.collective == Collective::kReduceScatter;
  const Range message{0, blocks ? one.count * world_size : one.count};
  const auto info = make_info(call, message.count);
  std::vector<std::vector<float>> inputs(world_size);
  std::vector<std::vector<float>> outputs(world_size, std::vector<float>(message.count));
  for (int rank = 0; rank < world_size; ++rank) {
    for (int64_t i = 0; i < message.count; ++i) {
      inputs[rank].push_back(static_cast<float>((rank * 5 + i * 3 + run_id) % 13));
    }
  }
  world.spawn([&](int rank) {
    const Range in = input_range(one.collective, message, world_size, rank);
    const Range out = output_range(one.collective, message, world_size, rank);
    Request request;
    request.info = info;
    request.rank = rank;
    request.run_id = run_id;
    request.input.begin_at(in.offset);
    request.input.add(inputs[rank].data() + in.offset, in.count);
    request.output.begin_at(out.offset);
    request.output.add(outputs[rank].data() + out.offset, out.count);
    const auto error = Submitted::start(world.of_rank(rank), std::move(request)).error();
    EXPECT_FALSE(error) << error->text();
  });
  for (int rank = 0; rank < world_size; ++rank) {
    const std::vector<float> expected = expected_of(one, call.root, rank, inputs);
    const Range out = output_range(one.collective, message, world_size, rank);
    ASSERT_TRUE(std::equal(expected.begin() + out.offset, expected.begin() + out.offset + out.count,
                           outputs[rank].begin() + out.offset))
        << jaxring::name_of(one.collective) << " " << one.count << " rank " << rank << " of "
        << world_size;
  }
}

void expect_all_right(Layout layout) {
  for (const std::vector<int>& hosts : kLayouts) {
    TestWorld world(layout, static_cast<int>(hosts.size()), hosts);
    uint64_t run_id = 1;
    for (int64_t count : {5000, 5001, 70000, kSanitized ? 140000 : 1500000}) {
      for (Collective collective :
           {Collective::kAllreduce, Collective::kBroadcast, Collective::kReduce}) {
        expect_right(world, Case{collective, ReduceOp::kSum, count}, run_id++);
      }
    }
    for (int64_t count : {1, 5000, 70000}) {
      expect_right(world, Case{Collective::kAllGather, ReduceOp::kSum, count}, run_id++);
      expect_right(world, Case{Collective::kReduceScatter, ReduceOp::kMean, count}, run_id++);
    }
  }
}

TEST(Hierarchical, EqualsTheReference) { expect_all_right(Layout::kProcesses); }

TEST(Hierarchical, EqualsTheReferenceOverLinks) {
  if (JAXRING_HAS_LIBFABRIC && !kSanitized) expect_all_right(Layout::kHosts);
}

TEST(Hierarchical, IsChosenWhereHostsAreShared) {
  const HostLayout shared({0, 0, 1, 1}), apart({0, 1}), one({0, 0});
  Criteria call{Collective::kAllreduce, Algorithm::kAuto, false, 4, 1 << 20, 4, 4, 0, &shared};
  EXPECT_EQ(select(call).algorithm, Algorithm::kHierarchical);
  call.deterministic = true;  // in rank order only
  EXPECT_NE(select(call).algorithm, Algorithm::kHierarchical);
  call.deterministic = false;
  for (Collective collective : {Collective::kAllGather, Collective::kReduceScatter}) {
    call.collective = collective;
    EXPECT_EQ(select(call).algorithm, Algorithm::kHierarchical);
  }
  call.collective = Collective::kAllToAll;  // has no such schedule
  EXPECT_NE(select(call).algorithm, Algorithm::kHierarchical);
  call.collective = Collective::kAllreduce;
  call.process_count = 2;
  call.hosts = &apart;
  EXPECT_NE(select(call).algorithm, Algorithm::kHierarchical);
  call.hosts = &one;
  EXPECT_NE(select(call).algorithm, Algorithm::kHierarchical);
}

}  // namespace
}  // namespace jaxring::testing
