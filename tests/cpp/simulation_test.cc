// Simulated times against the closed formulas (Thakur, Rabenseifner, Gropp, IJHPCA 19(1), 2005),
// and simulated bytes against those that CountingPrims counts.
#include "xla_ffi/algorithms/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "xla_ffi/algorithms/counting.h"

namespace jaxring {
namespace {

SimulatedCall call_of(Algorithm algorithm, int world_size, int64_t count = 1 << 20) {
  SimulatedCall call;
  call.algorithm = algorithm;
  call.world_size = world_size;
  call.count = count;
  call.chunk_elements = count;  // one chunk, as in the formulas
  return call;
}

int log2_up(int n) { return static_cast<int>(std::ceil(std::log2(n))); }

TEST(Simulation, HopsAreTheFormulas) {
  for (int p : {2, 3, 4, 7, 8, 16, 64, 100}) {
    EXPECT_EQ(hops_of(call_of(Algorithm::kRing, p)), 2 * (p - 1)) << p;
    EXPECT_EQ(hops_of(call_of(Algorithm::kDirect, p)), p == 2 ? 1 : 2) << p;
    EXPECT_EQ(hops_of(call_of(Algorithm::kReducer, p)), 2) << p;
    EXPECT_EQ(hops_of(call_of(Algorithm::kChain, p)), 2 * (p - 1)) << p;
    EXPECT_LE(hops_of(call_of(Algorithm::kTree, p)), 2 * (log2_up(p) + 1)) << p;
  }
  EXPECT_EQ(hops_of(call_of(Algorithm::kHalvingDoubling, 64)), 12);
  EXPECT_EQ(hops_of(call_of(Algorithm::kHalvingDoubling, 65)), 14);
}

TEST(Simulation, TimesAreTheFormulas) {
  Machine machine;
  machine.between = Link{10e-6, 1e-9};
  machine.reduce_s_per_byte = 0.1e-9;
  const double a = machine.between.latency_s, b = machine.between.s_per_byte;
  const double g = machine.reduce_s_per_byte;
  for (int p : {2, 4, 16, 64}) {
    const SimulatedCall ring = call_of(Algorithm::kRing, p);
    const double n = ring.count * 4.0, share = (p - 1.0) / p;
    EXPECT_NEAR(simulate(ring, machine).time_s, 2 * (p - 1) * a + share * n * (2 * b + g), 1e-9);
    const SimulatedCall cube = call_of(Algorithm::kHalvingDoubling, p);
    EXPECT_NEAR(simulate(cube, machine).time_s, 2 * log2_up(p) * a + share * n * (2 * b + g), 1e-9);
    // All ranks' messages go through rank 0's interface.
    const SimulatedCall reducer = call_of(Algorithm::kReducer, p);
    EXPECT_NEAR(simulate(reducer, machine).time_s, 2 * a + (p - 1) * n * (2 * b + g), 1e-9);
  }
}

// Ranks of one host share its interface; a ring in the order of hosts crosses it once.
TEST(Simulation, HostsShareTheirInterface) {
  Machine machine;
  machine.ranks_per_host = 4;
  machine.between = Link{0, 1e-9};
  const SimulatedCall ring = call_of(Algorithm::kRing, 32, 32 << 15);
  const double n = ring.count * 4.0;
  const SimulatedRun once = simulate(ring, machine);
  EXPECT_NEAR(once.time_s, 2 * 31.0 / 32 * n * 1e-9, 1e-9);
  EXPECT_EQ(once.host_bytes_sent, 2 * 31 * ring.count * 4 / 32);
  const SimulatedRun direct = simulate(call_of(Algorithm::kDirect, 32, 32 << 15), machine);
  EXPECT_EQ(direct.host_bytes_sent, 2 * 4 * 28 * ring.count * 4 / 32);
  EXPECT_GE(direct.time_s, direct.host_bytes_sent * 1e-9);
}

// Two levels: 2 (h-1)/h n crosses each host's link, and no rank waits for 2 (p-1) messages.
TEST(Simulation, TwoLevelsCrossTheInterfaceAsARingOfHosts) {
  Machine machine;
  machine.ranks_per_host = 4;
  machine.within = Link{1e-6, 0.1e-9};
  machine.between = Link{10e-6, 1e-9};
  SimulatedCall call = call_of(Algorithm::kHierarchical, 28, 28 << 15);
  call.chunk_elements = 16 << 10;
  const double n = call.count * 4.0, hosts = 7;
  const SimulatedRun two_levels = simulate(call, machine);
  EXPECT_NEAR(two_levels.host_bytes_sent, 2 * (hosts - 1) / hosts * n, 0.1 * n);
  EXPECT_GE(two_levels.time_s, two_levels.host_bytes_sent * machine.between.s_per_byte);
  EXPECT_LT(hops_of(call_of(Algorithm::kHierarchical, 28), 4),
            hops_of(call_of(Algorithm::kRing, 28), 4));
}

// Each block crosses to each other host once; directly, once to each of its ranks.
TEST(Simulation, TwoLevelsGatherAndScatterEachBlockOnce) {
  Machine machine;
  machine.ranks_per_host = 4;
  machine.within = Link{1e-6, 0.1e-9};
  machine.between = Link{10e-6, 1e-9};
  for (Collective collective : {Collective::kAllGather, Collective::kReduceScatter}) {
    SimulatedCall call = call_of(Algorithm::kHierarchical, 28, 28 << 12);
    call.collective = collective;
    call.chunk_elements = 1 << 10;
    const SimulatedRun two_levels = simulate(call, machine);
    EXPECT_EQ(two_levels.host_bytes_sent, 24 * 4 << 12);
    call.algorithm = Algorithm::kRing;
    EXPECT_EQ(simulate(call, machine).host_bytes_sent, 27 * 4 << 12);
    call.algorithm = Algorithm::kDirect;
    const SimulatedRun direct = simulate(call, machine);
    EXPECT_EQ(direct.host_bytes_sent, 4 * two_levels.host_bytes_sent);
    EXPECT_GT(direct.time_s, 2 * two_levels.time_s);
  }
}

TEST(Simulation, BytesAreThoseCounted) {
  for (Algorithm algorithm :
       {Algorithm::kRing, Algorithm::kTree, Algorithm::kHalvingDoubling, Algorithm::kDirect}) {
    SimulatedCall call = call_of(algorithm, 13, 10'007);
    call.chunk_elements = 100;
    call.element_bytes = 2;  // bfloat16, whose partial results travel as float32
    int64_t most = 0, messages = 0;
    for (int rank = 0; rank < call.world_size; ++rank) {
      CountingPrims counted;
      for (int c = 0; c < channels_of(algorithm, call.collective); ++c) {
        run_schedule(algorithm, c, counted, World{rank, call.world_size, call.chunk_elements},
                     Work{call.collective, Range{0, call.count}});
      }
      most = std::max(most, counted.bytes_sent(4, 2));
      messages += counted.messages_sent();
    }
    const SimulatedRun run = simulate(call, Machine{});
    EXPECT_EQ(run.rank_bytes_sent, most) << info_of(algorithm).name;
    EXPECT_EQ(run.messages, messages) << info_of(algorithm).name;
  }
}

// With chunks a tree's levels overlap: two children's copies, not two for each level.
TEST(Simulation, ChunksOverlap) {
  Machine machine;
  machine.between = Link{1e-6, 1e-9};
  SimulatedCall tree = call_of(Algorithm::kTree, 64, 16 << 20);
  tree.collective = Collective::kBroadcast;
  const double whole_s = simulate(tree, machine).time_s;
  tree.chunk_elements = 64 << 10;
  const double chunked_s = simulate(tree, machine).time_s;
  const double two_copies_s = 2 * tree.count * 4 * 1e-9;
  EXPECT_GT(whole_s, 3 * two_copies_s);
  EXPECT_LT(chunked_s, 1.2 * two_copies_s);
  EXPECT_GE(chunked_s, two_copies_s);
}

}  // namespace
}  // namespace jaxring
