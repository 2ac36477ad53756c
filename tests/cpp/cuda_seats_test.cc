// What communicators of GPUs tell of themselves, how they are made anew, and NVLink's multicast:
// over fake GPUs and a fake NCCL.
#include <gtest/gtest.h>

#include <thread>

#include "tests/cpp/cuda_fixture.h"
#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/cuda_ffi/watchdog.h"

namespace jaxring::cuda {
namespace {

class CudaSeats : public WithoutCliques {
 protected:
  void SetUp() override {
    WithoutCliques::SetUp();
    Seats::instance().rejoin();  // what other tests have left
    Seats::instance().stats(/*reset=*/true);
  }

  static std::vector<StatsRow> stats_of(const std::string& key, bool reset = false) {
    std::vector<StatsRow> rows;
    for (const StatsRow& row : Seats::instance().stats(reset)) {
      if (row.communicator == key) rows.push_back(row);
    }
    return rows;
  }

  // Events of a kind, of those that have come.
  static std::vector<std::string> told(const std::string& kind) {
    std::vector<std::string> texts;
    while (auto event = Events::instance().next(0)) {
      if (event->kind == kind) texts.push_back(event->text);
    }
    return texts;
  }
};

// What one rank sends another receives, and the formulas of docs/algorithms.
TEST(CudaTraffic, IsThatOfTheSchedules) {
  constexpr int kRanks = 8;
  const auto traffic = [](KernelCall call, int rank) { return traffic_of(call, rank, kRanks); };
  KernelCall call;
  call.count = 1 << 20;
  const int64_t bytes = 4 * call.count;
  for (const AlgorithmInfo& info : kAlgorithms) {
    call.algorithm = info.algorithm;
    int64_t sent = 0, received = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      sent += traffic(call, rank).bytes_sent;
      received += traffic(call, rank).bytes_received;
    }
    EXPECT_EQ(sent, received) << info.name;
    EXPECT_GE(sent, 2 * (kRanks - 1) * bytes) << info.name;
  }
  call.algorithm = Algorithm::kRing;
  EXPECT_EQ(traffic(call, 3).bytes_sent, 2 * (kRanks - 1) * bytes / kRanks);
  EXPECT_STREQ(traffic(call, 3).algorithm, "ring");
  call.algorithm = Algorithm::kAuto;
  EXPECT_EQ(traffic(call, 3).bytes_sent, 2 * (kRanks - 1) * bytes / kRanks);  // two-shot
  EXPECT_STREQ(traffic(call, 3).algorithm, "direct");
  call.multimem = true;
  call.deterministic = false;
  EXPECT_EQ(traffic(call, 3).bytes_sent, bytes);
  EXPECT_STREQ(traffic(call, 3).algorithm, "multimem");
  call = {};
  call.collective = Collective::kBroadcast;
  call.root = 2;
  call.count = 10;
  EXPECT_EQ(traffic(call, 2).bytes_sent, (kRanks - 1) * 40);
  EXPECT_EQ(traffic(call, 3).bytes_received, 40);
  EXPECT_EQ(traffic(call, 3).bytes_sent, 0);
}

TEST_F(CudaSeats, StatsCountWhatKernelsHaveEnded) {
  const std::string key = set_up(3, 200);
  Program program(3, tables(3, 200), false);
  ASSERT_EQ(program.instantiate(), "");
  for (int run = 0; run < 4; ++run) expect_sums(program, 3, 5);
  std::vector<StatsRow> rows = stats_of(key, /*reset=*/true);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].collective, "allreduce");
  EXPECT_EQ(rows[0].algorithm, "direct");
  EXPECT_EQ(rows[0].transport, "cuda_in_process");
  EXPECT_EQ(rows[0].operations, 3 * 4);
  EXPECT_EQ(rows[0].bytes_sent, 3 * 4 * 20);
  EXPECT_EQ(rows[0].bytes_received, 3 * 4 * 40);
  EXPECT_TRUE(stats_of(key).empty());
  expect_sums(program, 3, 5);
  EXPECT_EQ(stats_of(key)[0].operations, 3);
  Seats::instance().close(key);
  EXPECT_EQ(stats_of(key)[0].operations, 3);  // is still known
}

TEST_F(CudaSeats, AnAllreduceAcrossHostsIsOneOperation) {
  machine().host = [](int device) { return uint64_t(device / 2); };
  Program program(4, tables(4, 210));
  ASSERT_EQ(program.instantiate(), "");
  expect_sums(program, 4, 8);
  const std::vector<StatsRow> rows = stats_of("mesh:210,211,212,213");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].algorithm, "hierarchical");
  EXPECT_EQ(rows[0].operations, 4);
  EXPECT_EQ(rows[0].bytes_sent, 4 * (32 + 16));  // within the host, and this rank's half between
}

TEST_F(CudaSeats, MoreCallsThanTheLogHasPlacesFor) {
  const std::string key = set_up(1, 220);
  const std::shared_ptr<Seat> seat = Seats::instance().wait_for(key, 0);
  const auto site = [&](int i) {
    return seat->site_of({"allreduce", std::to_string(i), "", "", {}});
  };
  EXPECT_EQ(site(0), 1);
  EXPECT_EQ(site(1), 2);
  EXPECT_EQ(site(0), 1);
  for (int i = 0; i < 2 * kMostSites; ++i) EXPECT_LT(site(i), kMostSites);
  EXPECT_EQ(site(2 * kMostSites - 1), kMostSites - 1);
  Seats::instance().close(key);
}

TEST_F(CudaSeats, ALongWaitIsToldOnceAndNamesCallAndPeer) {
  const std::string key = set_up(2, 230);
  Attributes attributes = tables(2, 230);
  attributes.text("name", "grads");
  Program program(2, attributes, false);
  ASSERT_EQ(program.instantiate(), "");
  expect_sums(program, 2, 3);
  settings().warn_s = 0.05;
  std::vector<float> first(3), second(3);
  std::string error = "not yet";
  std::thread waiting([&] { error = program.run(0, {1, 2, 3}, &first); });
  std::vector<std::string> texts;
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (texts.empty() && std::chrono::steady_clock::now() < limit) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    Watchdog::instance().look();
    texts = told("stall");
  }
  Watchdog::instance().look();
  EXPECT_TRUE(told("stall").empty());
  EXPECT_EQ(program.run(1, {1, 2, 3}, &second), "");  // it comes after all
  waiting.join();
  EXPECT_EQ(error, "");
  EXPECT_EQ(first, (std::vector<float>{2, 4, 6}));
  ASSERT_EQ(texts.size(), 1u);
  EXPECT_NE(texts[0].find("communicator " + key + ": allreduce 'grads' on the GPU of rank 0"),
            std::string::npos)
      << texts[0];
  EXPECT_NE(texts[0].find("missing rank 1 (pid "), std::string::npos) << texts[0];
  Seats::instance().close(key);
}

TEST_F(CudaSeats, TheLastCallIsOnRecordWhenOneFails) {
  const std::string key = set_up(2, 240);
  Attributes attributes = tables(2, 240);
  attributes.text("name", "grads");
  Program program(2, attributes, false);
  ASSERT_EQ(program.instantiate(), "");
  expect_sums(program, 2, 3);
  const std::shared_ptr<Seat> seat = Seats::instance().wait_for(key, 0);
  std::optional<LastCall> last = seat->last_call();
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->number, 0u);
  EXPECT_EQ(last->outcome, "done");
  settings().timeout_s = 0.2;
  std::vector<float> output(3);
  EXPECT_EQ(program.run(0, {1, 2, 3}, &output), "");
  last = seat->last_call();
  ASSERT_TRUE(last.has_value());
  EXPECT_EQ(last->number, 1u);
  EXPECT_EQ(last->outcome, "TimeoutError");
  EXPECT_EQ(last->site.name, "grads");
  EXPECT_NE(last->site.signature.find("allreduce(sum"), std::string::npos);
  Watchdog::instance().look();
  const std::vector<std::string> errors = told("error");  // a flight record is written for it
  ASSERT_EQ(errors.size(), 1u);
  EXPECT_NE(errors[0].find("allreduce 'grads'"), std::string::npos) << errors[0];
  Seats::instance().close(key);
}

TEST_F(CudaSeats, RejoinMakesABrokenCliqueWhole) {
  Program program(2, tables(2, 250));
  ASSERT_EQ(program.instantiate(), "");
  expect_sums(program, 2, 3);
  settings().timeout_s = 0.2;
  std::vector<float> output(3);
  EXPECT_EQ(program.run(0, {1, 2, 3}, &output), "");
  EXPECT_NE(program.run(0, {1, 2, 3}, &output).find("jaxring.TimeoutError"), std::string::npos);
  settings().timeout_s = 20;
  EXPECT_NE(program.run(1, {1, 2, 3}, &output).find("jaxring.TimeoutError"), std::string::npos);
  Seats::instance().rejoin();
  program.expect_set_up();
  for (int run = 0; run < 2; ++run) expect_sums(program, 2, 3);
  // Before and after, as one communicator.
  const std::vector<StatsRow> rows = stats_of("mesh:250,251");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].operations, 3 * 2);
}

TEST_F(CudaSeats, WhatTheLoweringMadeAnewIsUsed) {
  std::string key = set_up(2, 260);
  Program program(2, tables(2, 260), false);
  ASSERT_EQ(program.instantiate(), "");
  expect_sums(program, 2, 3);
  settings().timeout_s = 0.2;
  std::vector<float> output(3);
  EXPECT_EQ(program.run(0, {1, 2, 3}, &output), "");
  settings().timeout_s = 20;
  Seats::instance().close(key);  // as jaxring.rejoin() does it
  key = set_up(2, 260);
  program.expect_set_up();
  for (int run = 0; run < 2; ++run) expect_sums(program, 2, 3);
  Seats::instance().close(key);
}

class CudaMulticast : public CudaSeats {
 protected:
  void SetUp() override {
    CudaSeats::SetUp();
    fake::nvswitch().supports = [](int) { return true; };
    fake::nvswitch().early = 0;
  }
  static std::string reason(int ranks, int first_id) {
    Program program(ranks, tables(ranks, first_id));
    EXPECT_EQ(program.instantiate(), "");
    expect_sums(program, ranks, 5);
    std::string why;
    for (const auto& seat : Seats::instance().all()) {
      if (seat->key().find(":" + std::to_string(first_id)) == std::string::npos) continue;
      const std::string mine = seat->multicast().there() ? "there" : seat->multicast().why_not();
      EXPECT_TRUE(why.empty() || why == mine) << "ranks must agree: " << why << "; " << mine;
      why = mine;
    }
    return why;
  }
};

TEST_F(CudaMulticast, GpusOfOneProcessOnASwitch) {
  EXPECT_EQ(reason(4, 300), "there");
  EXPECT_EQ(fake::nvswitch().bound, 4);
  EXPECT_EQ(fake::nvswitch().early, 0);  // nobody binds before all have been added
  EXPECT_EQ(stats_of("mesh:300,301,302,303")[0].algorithm, "multimem");
  Seats::instance().rejoin();
}

TEST_F(CudaMulticast, WhereItCannotBe) {
  EXPECT_EQ(reason(2, 310), "two ranks read each other's memory as fast");
  fake::nvswitch().supports = [](int device) { return device != 1; };
  EXPECT_NE(reason(3, 320).find("GPU 1 has no multicast"), std::string::npos);
  fake::nvswitch().supports = [](int) { return true; };
  machine().pid = [](int device) { return device < 2 ? int64_t{getpid()} : int64_t{1}; };
  EXPECT_EQ(reason(4, 330), "the ranks are of several processes");
}

TEST_F(CudaMulticast, WhereOneRankFailsAllDoWithout) {
  const int bound = fake::nvswitch().bound, objects = fake::nvswitch().objects;
  fake::nvswitch().binds = [](int device) { return device != 2; };
  EXPECT_EQ(reason(4, 340), "the fabric manager is not ready");
  EXPECT_EQ(fake::nvswitch().bound, bound);  // and nothing is left
  EXPECT_EQ(fake::nvswitch().objects, objects);
}

}  // namespace
}  // namespace jaxring::cuda
