// Every collective but allreduce (schedules_test.cc): world size x count x dtype x layout x
// algorithm against a plain restatement of what it means.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "world.h"
#include "xla_ffi/algorithms/counting.h"
#include "xla_ffi/host/reduce_kernels.h"

namespace jaxring::testing {
namespace {

struct Case {
  Collective collective;
  Algorithm algorithm = Algorithm::kAuto;
  int root = 0;
  int shift = 0;  // of a ppermute: rank r sends to r + shift; 0: only rank 0 sends, to the last
};

bool has_blocks(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather ||
         collective == Collective::kAllToAll;
}

std::vector<Case> cases_of(int world_size) {
  const int last = world_size - 1;
  std::vector<Case> cases = {{Collective::kAllToAll},
                             {Collective::kPermute, Algorithm::kAuto, 0, 0},
                             {Collective::kPermute, Algorithm::kAuto, 0, 1},
                             {Collective::kPermute, Algorithm::kAuto, 0, world_size}};
  for (Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing}) {
    cases.push_back({Collective::kReduceScatter, algorithm});
    cases.push_back({Collective::kAllGather, algorithm});
  }
  for (Algorithm algorithm : {Algorithm::kDirect, Algorithm::kTree}) {
    for (Collective collective : {Collective::kBroadcast, Collective::kReduce}) {
      cases.push_back({collective, algorithm, 0});
      cases.push_back({collective, algorithm, last});
      cases.push_back({collective, algorithm, last / 2});
    }
  }
  return cases;
}

CallInfo call_of(const Case& c, int world_size, DType dtype) {
  CallInfo call;
  call.collective = c.collective;
  call.algorithm = c.algorithm;
  call.dtype = dtype;
  call.root = c.root;
  if (c.collective == Collective::kPermute) {
    call.destinations.assign(world_size, -1);
    for (int rank = 0; rank < world_size; ++rank) {
      if (c.shift > 0) call.destinations[rank] = (rank + c.shift) % world_size;
    }
    if (c.shift == 0) call.destinations[0] = world_size - 1;
  }
  return call;
}

// A whole message for each rank: small integers, exact in every dtype, distinct by rank and place.
template <typename T>
std::vector<std::vector<T>> messages_of(int world_size, int64_t count) {
  std::vector<std::vector<T>> messages(world_size, std::vector<T>(count));
  for (int rank = 0; rank < world_size; ++rank) {
    for (int64_t i = 0; i < count; ++i) {
      messages[rank][i] = static_cast<T>(static_cast<float>((rank * 5 + i * 3) % 13 - 4));
    }
  }
  return messages;
}

// What `rank` should have, at the places that its result covers.
template <typename T>
std::vector<T> expected_of(const CallInfo& call, int rank,
                           const std::vector<std::vector<T>>& messages) {
  const int world_size = static_cast<int>(messages.size());
  const int64_t count = messages[0].size(), block = count / world_size;
  std::vector<T> expected(count);
  std::vector<Operand> operands;
  for (const auto& message : messages) operands.push_back(Operand{message.data(), false});
  switch (call.collective) {
    case Collective::kReduceScatter:
    case Collective::kReduce:
      if (call.collective == Collective::kReduce && rank != call.root) break;
      fold(call.dtype, call.op, operands.data(), world_size, expected.data(), false, count,
           world_size);
      break;
    case Collective::kAllGather:
      for (int64_t i = 0; i < count; ++i) expected[i] = messages[i / block][i];
      break;
    case Collective::kAllToAll:
      for (int64_t i = 0; i < count; ++i) {
        expected[i] = messages[i / block][rank * block + i % block];
      }
      break;
    case Collective::kBroadcast:
      return messages[call.root];
    case Collective::kPermute:
      if (call.sender_to(rank) >= 0) return messages[call.sender_to(rank)];
      break;
    default:
      ADD_FAILURE() << "no expectation";
  }
  return expected;
}

std::string describe(const CallInfo& call, int rank, int world_size, int64_t count) {
  return std::string(name_of(call.collective)) + " by " +
         std::string(info_of(call.algorithm).name) + " of " + std::to_string(count) + " x " +
         name_of(call.dtype) + ", root " + std::to_string(call.root) + ", rank " +
         std::to_string(rank) + " of " + std::to_string(world_size);
}

// The part of a whole message, in two leaves where it is one block and has room for them.
template <class Pointer, typename T>
Leaves<Pointer> part_of(std::vector<T>& message, Range range) {
  Leaves<Pointer> leaves(range.offset);
  leaves.add(message.data() + range.offset, range.count / 3);
  leaves.add(message.data() + range.offset + range.count / 3, range.count - range.count / 3);
  return leaves;
}

template <typename T>
class CheckOf final : public Check {
 public:
  CheckOf(int world_size, const Case& c, int64_t count, uint64_t run_id)
      : call_(call_of(c, world_size, DTypeTraits<T>::dtype)),
        count_(has_blocks(c.collective) ? count * world_size : count),
        info_(make_info(call_, count_)),
        run_id_(run_id),
        messages_(messages_of<T>(world_size, count_)),
        inputs_(messages_),
        // Garbage, so that what nobody writes shows.
        outputs_(world_size, std::vector<T>(count_, static_cast<T>(77.0f))) {}

  void run(TestWorld& world, int rank) override {
    const Range message{0, count_};
    const Range in = input_range(call_.collective, message, world.world_size(), rank);
    const Range out = output_range(call_.collective, message, world.world_size(), rank);
    Request request;
    request.info = info_;
    request.rank = rank;
    request.run_id = run_id_;
    if (has_blocks(call_.collective)) {  // leaves would have to be cut alike in every block
      request.input.begin_at(in.offset);
      request.input.add(inputs_[rank].data() + in.offset, in.count);
      request.output.begin_at(out.offset);
      request.output.add(outputs_[rank].data() + out.offset, out.count);
    } else {
      request.input = part_of<const void*>(inputs_[rank], in);
      request.output = part_of<void*>(outputs_[rank], out);
    }
    const std::optional<Error> error =
        Submitted::start(world.of_rank(rank), std::move(request)).error();
    EXPECT_FALSE(error) << error->text();
  }

  void verify() const override {
    const int n = static_cast<int>(messages_.size());
    for (int rank = 0; rank < n; ++rank) {
      ASSERT_EQ(0, std::memcmp(inputs_[rank].data(), messages_[rank].data(), count_ * sizeof(T)));
      const std::vector<T> expected = expected_of(call_, rank, messages_);
      const Range out = output_range(call_.collective, Range{0, count_}, n, rank);
      ASSERT_EQ(0, std::memcmp(outputs_[rank].data() + out.offset, expected.data() + out.offset,
                               out.count * sizeof(T)))
          << describe(call_, rank, n, count_);
    }
  }

 private:
  const CallInfo call_;
  const int64_t count_;
  const std::shared_ptr<const CallInfo> info_;
  const uint64_t run_id_;
  const std::vector<std::vector<T>> messages_;
  std::vector<std::vector<T>> inputs_;
  std::vector<std::vector<T>> outputs_;
};

template <typename T>
void add(Checks& checks, int world_size, const Case& c, int64_t count, uint64_t* run_id) {
  checks.push_back(std::make_unique<CheckOf<T>>(world_size, c, count, (*run_id)++));
}

class Collectives : public ::testing::TestWithParam<std::tuple<Layout, int>> {};

TEST_P(Collectives, EqualTheirMeaning) {
  const auto [layout, world_size] = GetParam();
  if (kSanitized && world_size % 3 != 2) return;
  TestWorld world(layout, world_size);
  uint64_t run_id = 1;
  const int64_t slot = kFifoSlotBytes / 4;  // elements of a slot that holds float32
  for (const Case& c : cases_of(world_size)) {
    Checks checks;
    for (int64_t count : {int64_t{0}, int64_t{1}, int64_t{7}, int64_t{1009}, slot - 1, slot + 1}) {
      add<float>(checks, world_size, c, count, &run_id);
      if (kSanitized || count > 1009) continue;
      add<BFloat16>(checks, world_size, c, count, &run_id);
      add<double>(checks, world_size, c, count, &run_id);
      add<int8_t>(checks, world_size, c, count, &run_id);
    }
    if (!kSanitized) add<BFloat16>(checks, world_size, c, 300007, &run_id);  // more than a FIFO
    run_all(world, checks);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collectives,
                         ::testing::Combine(::testing::ValuesIn(all_layouts()),
                                            ::testing::Range(1, 10)),
                         [](const auto& info) {
                           return std::string(name_of(std::get<0>(info.param))) + "_" +
                                  std::to_string(std::get<1>(info.param));
                         });

// Leaves that are cut in every block: block r holds row r of each leaf.
TEST(Collectives, SeveralLeavesInBlocks) {
  for (Layout layout : {Layout::kDevices, Layout::kProcesses}) {
    for (Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing}) {
      const int n = 3;
      TestWorld world(layout, n);
      const int64_t rows[] = {5, 20000};  // elements of a row of each leaf
      CallInfo call;
      call.collective = Collective::kReduceScatter;
      call.algorithm = algorithm;
      const auto info = make_info(call, n * (rows[0] + rows[1]));
      world.spawn([&](int rank) {
        std::vector<std::vector<float>> in, out;
        Request request;
        request.info = info;
        request.rank = rank;
        request.run_id = 1;
        for (int64_t row : rows) {
          in.emplace_back(n * row);
          out.emplace_back(row);
          for (int64_t i = 0; i < n * row; ++i) in.back()[i] = static_cast<float>(i + rank);
        }
        for (int block = 0; block < n; ++block) {
          for (int leaf = 0; leaf < 2; ++leaf) {
            request.input.add(in[leaf].data() + block * rows[leaf], rows[leaf]);
          }
        }
        request.output.begin_at(rank * (rows[0] + rows[1]));
        for (int leaf = 0; leaf < 2; ++leaf) request.output.add(out[leaf].data(), rows[leaf]);
        const auto error = Submitted::start(world.of_rank(rank), std::move(request)).error();
        EXPECT_FALSE(error) << error->text();
        for (int leaf = 0; leaf < 2; ++leaf) {
          for (int64_t i = 0; i < rows[leaf]; ++i) {
            ASSERT_EQ(out[leaf][i], 3 * (rank * rows[leaf] + i) + 3) << leaf << " " << i;
          }
        }
      });
    }
  }
}

// Nobody leaves a barrier before all have entered it.
TEST(Barrier, HoldsUntilTheLastRankIsThere) {
  for (Layout layout : {Layout::kDevices, Layout::kProcesses}) {
    TestWorld world(layout, 3);
    CallInfo call;
    call.collective = Collective::kBarrier;
    const auto info = make_info(call, 0);
    std::atomic<int> entered{0};
    for (uint64_t run_id = 1; run_id <= 20; ++run_id) {
      world.spawn([&](int rank) {
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        ++entered;
        Request request;
        request.info = info;
        request.rank = rank;
        request.run_id = run_id;
        EXPECT_FALSE(Submitted::start(world.of_rank(rank), std::move(request)).error());
        EXPECT_GE(entered.load(), static_cast<int>(3 * run_id));
      });
    }
  }
}

// The two halves of the ring allreduce move half of what it does.
TEST(Traffic, OfTheHalvesOnEveryRank) {
  for (int p = 2; p <= (kSanitized ? 3 : 9); ++p) {
    TestWorld world(Layout::kProcesses, p);
    uint64_t run_id = 1;
    const int64_t block = 20000;
    for (Collective collective : {Collective::kReduceScatter, Collective::kAllGather}) {
      for (Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing}) {
        Checks checks;
        add<float>(checks, p, {collective, algorithm}, block, &run_id);
        run_all(world, checks);
        for (int rank = 0; rank < p; ++rank) {
          const StatsRow row = world.of_rank(rank).stats(true).at(0);
          EXPECT_EQ(row.collective, name_of(collective));
          EXPECT_EQ(row.bytes_sent, (p - 1) * block * 4) << row.collective << " " << row.algorithm;
          EXPECT_EQ(row.bytes_received, (p - 1) * block * 4);
        }
      }
    }
  }
}

}  // namespace
}  // namespace jaxring::testing
