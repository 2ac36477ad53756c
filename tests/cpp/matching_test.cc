// Matching by key: whatever the order of arrival, the right calls meet. Values are distinct per
// rank, call and execution, so a wrong pairing gives a wrong sum, not only a hang.
#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <random>

#include "world.h"
#include "xla_ffi/communicator/settings.h"

namespace jaxring::testing {
namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kExecutions = 20;
#else
constexpr int kExecutions = 200;
#endif

struct Call {
  std::shared_ptr<const CallInfo> info;
  int64_t count;
};

// Buffers of one rank's execution of one call, and what must come out.
struct Arrays {
  Arrays(int rank, int world_size, int call, int execution, int64_t count)
      : input(count), output(count, -1.0f) {
    const float base = static_cast<float>(call * 1000 + execution % 97);
    std::fill(input.begin(), input.end(), base + rank);
    expected = world_size * base + world_size * (world_size - 1) / 2.0f;
  }
  Request request(const Call& call, int rank, uint64_t run_id, uint32_t index, uint32_t copy = 0,
                  uint32_t iteration = 0) {
    Request request;
    request.info = call.info;
    request.rank = rank;
    request.run_id = run_id;
    request.call = index;
    request.copy = copy;
    request.iteration = iteration;
    request.input.add(input.data(), call.count);
    request.output.add(output.data(), call.count);
    return request;
  }
  bool right() const {
    return std::all_of(output.begin(), output.end(), [&](float v) { return v == expected; });
  }
  std::vector<float> input, output;
  float expected;
};

std::vector<Call> equal_shape_calls(int call_count) {
  // Small ones travel with their announcement, large ones through FIFOs in the leader's order.
  std::vector<Call> calls;
  const Algorithm algorithms[] = {Algorithm::kAuto, Algorithm::kRing, Algorithm::kDirect,
                                  Algorithm::kTree};
  for (int c = 0; c < call_count; ++c) {
    const int64_t count = c % 3 == 0 ? 5000 : 10;
    calls.push_back(
        Call{make_info(algorithms[c % 4], ReduceOp::kSum, DType::kFloat32, count), count});
  }
  return calls;
}

class Matching : public ::testing::TestWithParam<std::tuple<Layout, int>> {};

// Each rank starts all calls of a launch without waiting, in an order of its own.
TEST_P(Matching, IndependentCallsInRandomOrders) {
  const auto [layout, world_size] = GetParam();
  TestWorld world(layout, world_size);
  const std::vector<Call> calls = equal_shape_calls(10);
  world.spawn([&](int rank) {
    std::mt19937 random(rank + 1);
    std::vector<int> order(calls.size());
    std::iota(order.begin(), order.end(), 0);
    for (int execution = 0; execution < kExecutions; ++execution) {
      std::shuffle(order.begin(), order.end(), random);
      std::vector<Arrays> arrays;
      for (size_t c = 0; c < calls.size(); ++c) {
        arrays.emplace_back(rank, world.world_size(), c, execution, calls[c].count);
      }
      std::vector<Submitted> submitted;
      for (int c : order) {
        submitted.push_back(Submitted::start(
            world.of_rank(rank), arrays[c].request(calls[c], rank, 1000 + execution, c)));
      }
      for (Submitted& one : submitted) {
        const std::optional<Error> error = one.error();
        ASSERT_FALSE(error) << error->text();
      }
      for (const Arrays& one : arrays) ASSERT_TRUE(one.right());
    }
  });
}

// Copies of one call (an inner jit called 12 times) and iterations of a loop keep apart.
TEST_P(Matching, CopiesAndIterations) {
  const auto [layout, world_size] = GetParam();
  TestWorld world(layout, world_size);
  const Call call{make_info(Algorithm::kAuto, ReduceOp::kSum, DType::kFloat32, 6), 6};
  world.spawn([&](int rank) {
    std::mt19937 random(rank + 7);
    for (int execution = 0; execution < kExecutions; ++execution) {
      for (uint32_t iteration = 0; iteration < 2; ++iteration) {
        std::vector<int> order(12);
        std::iota(order.begin(), order.end(), 0);
        std::shuffle(order.begin(), order.end(), random);
        std::vector<Arrays> arrays;
        for (int c = 0; c < 12; ++c) {
          arrays.emplace_back(rank, world.world_size(), c, execution + iteration, call.count);
        }
        std::vector<Submitted> submitted;
        for (int c : order) {
          submitted.push_back(
              Submitted::start(world.of_rank(rank),
                               arrays[c].request(call, rank, 5000 + execution, 3, c, iteration)));
        }
        for (Submitted& one : submitted) ASSERT_FALSE(one.error());
        for (const Arrays& one : arrays) ASSERT_TRUE(one.right());
      }
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Matching,
                         ::testing::Combine(::testing::ValuesIn(all_layouts()),
                                            ::testing::Values(2, 5, 8)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// Far more calls in flight than a record ring holds: what finds no room waits in the sender's
// outbox, and the late rank still meets all of them.
TEST(Matching, MoreInFlightThanTheRingHolds) {
  TestWorld world(Layout::kProcesses, 2);
  const int64_t count =
      3000;  // 12 KB each with its announcement: 300 of them are 3.6 MB, the ring has 1
  const Call call{make_info(Algorithm::kAuto, ReduceOp::kSum, DType::kFloat32, count), count};
  world.spawn([&](int rank) {
    std::vector<Arrays> arrays;
    std::vector<Submitted> submitted;
    for (int c = 0; c < 300; ++c) arrays.emplace_back(rank, 2, c, 0, count);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    for (int i = 0; i < 300; ++i) {
      const int c = rank == 0 ? i : 299 - i;
      submitted.push_back(
          Submitted::start(world.of_rank(rank), arrays[c].request(call, rank, 1, c)));
    }
    for (Submitted& one : submitted) ASSERT_FALSE(one.error());
    for (const Arrays& one : arrays) ASSERT_TRUE(one.right());
  });
}

// Two communicators over the same ranks, their calls started in opposite orders by half the ranks.
TEST(Matching, OverlappingCommunicators) {
  for (Layout layout : {Layout::kDevices, Layout::kProcesses, Layout::kTwoDevicesPerProcess}) {
    TestWorld first(layout, 4), second(layout, 4);
    const std::vector<Call> calls = equal_shape_calls(4);
    first.spawn([&](int rank) {
      for (int execution = 0; execution < kExecutions; ++execution) {
        std::vector<Arrays> arrays;
        for (int c = 0; c < 8; ++c) arrays.emplace_back(rank, 4, c, execution, calls[c / 2].count);
        std::vector<Submitted> submitted;
        for (int i = 0; i < 8; ++i) {
          const int c = rank % 2 == 0 ? i : 7 - i;
          TestWorld& world = c % 2 == 0 ? first : second;
          submitted.push_back(Submitted::start(
              world.of_rank(rank), arrays[c].request(calls[c / 2], rank, 100 + execution, c)));
        }
        for (Submitted& one : submitted) ASSERT_FALSE(one.error());
        for (const Arrays& one : arrays) ASSERT_TRUE(one.right());
      }
    });
  }
}

// XLA may run independent calls of a device on several threads at the same time.
TEST(Matching, ThreeThreadsOfEachDevice) {
  TestWorld world(Layout::kDevices, 2);
  const Call call{make_info(Algorithm::kAuto, ReduceOp::kSum, DType::kFloat32, 6), 6};
  settings().timeout_s = 20;
  for (int launch = 0; launch < kExecutions; ++launch) {
    std::vector<std::thread> threads;
    for (int i = 0; i < 6; ++i) {
      const int rank = i % 2, index = i / 2;
      threads.emplace_back([&, rank, index, launch] {
        for (int iteration = 0; iteration < 5; ++iteration) {
          Arrays arrays(rank, 2, index, launch, call.count);
          Submitted one = Submitted::start(
              world.of_rank(rank), arrays.request(call, rank, 1 + launch, index, 0, iteration));
          const std::optional<Error> error = one.error();
          ASSERT_FALSE(error) << error->text();
          ASSERT_TRUE(arrays.right());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  settings().timeout_s = 300;
}

// In-flight executions of 64 ranks in one process are driven without a thread per rank.
TEST(Matching, ManyRanksInOneProcess) {
  const int n = 64;
  TestWorld world(Layout::kDevices, n);
  for (Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing, Algorithm::kTree}) {
    const Call call{make_info(algorithm, ReduceOp::kSum, DType::kFloat32, 1000), 1000};
    std::vector<Arrays> arrays;
    std::vector<Submitted> submitted;
    for (int rank = 0; rank < n; ++rank) arrays.emplace_back(rank, n, 1, 0, call.count);
    for (int rank = 0; rank < n; ++rank) {
      submitted.push_back(
          Submitted::start(world.of_rank(rank),
                           arrays[rank].request(call, rank, 10 + static_cast<int>(algorithm), 0)));
    }
    for (Submitted& one : submitted) ASSERT_FALSE(one.error());
    for (const Arrays& one : arrays) ASSERT_TRUE(one.right());
  }
}

}  // namespace
}  // namespace jaxring::testing
