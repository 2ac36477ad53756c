// A collective completes on all ranks or raises on all of them, in time, and says who and what.
#include <gtest/gtest.h>

#include "world.h"
#include "xla_ffi/communicator/settings.h"

namespace jaxring::testing {
namespace {

class Failures : public ::testing::TestWithParam<Layout> {
 protected:
  void SetUp() override { settings().timeout_s = 300; }
  void TearDown() override { settings().timeout_s = 300; }

  // One rank's submission of a call of `count` floats; buffers live as long as the test.
  Submitted start(TestWorld& world, int rank, uint64_t run_id, uint32_t call, int64_t count = 4,
                  ReduceOp op = ReduceOp::kSum, Algorithm algorithm = Algorithm::kAuto) {
    buffers_.push_back(std::make_unique<std::vector<float>>(2 * count, 1.0f));
    Request request;
    request.info = make_info(algorithm, op, DType::kFloat32, count);
    request.rank = rank;
    request.run_id = run_id;
    request.call = call;
    request.input.add(buffers_.back()->data(), count);
    request.output.add(buffers_.back()->data() + count, count);
    return Submitted::start(world.of_rank(rank), std::move(request));
  }

  static double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  std::vector<std::unique_ptr<std::vector<float>>> buffers_;
};

TEST_P(Failures, ARankThatNeverComesIsNamed) {
  settings().timeout_s = 1.5;  // on a busy machine all the others must have come by then
  TestWorld world(GetParam(), 4);
  const Clock::time_point begin = Clock::now();
  Submitted a = start(world, 0, 1, 0), b = start(world, 1, 1, 0), c = start(world, 3, 1, 0);
  for (Submitted* one : {&a, &b, &c}) {
    const std::optional<Error> error = one->error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind, ErrorKind::kTimeoutError);
    EXPECT_NE(error->message.find("missing rank 2"), std::string::npos) << error->message;
    EXPECT_EQ(error->missing_ranks, std::vector<int>{2});
  }
  EXPECT_LT(seconds_since(begin), 8.0);
}

TEST_P(Failures, DifferentSignaturesRaiseEverywhere) {
  TestWorld world(GetParam(), 4);
  std::vector<Submitted> submitted;
  for (int rank = 0; rank < 4; ++rank) {
    submitted.push_back(start(world, rank, 1, 0, rank == 2 ? 5 : 4));
  }
  for (Submitted& one : submitted) {
    const std::optional<Error> error = one.error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind, ErrorKind::kMismatchError);
    EXPECT_NE(error->message.find("rank 2: allreduce #0"), std::string::npos) << error->message;
    EXPECT_NE(error->message.find("float32[5]"), std::string::npos) << error->message;
    EXPECT_NE(error->message.find("float32[4]"), std::string::npos) << error->message;
  }
}

TEST_P(Failures, AnotherCallOfTheSameLaunchIsAMismatchAtTheDeadline) {
  settings().timeout_s = 0.3;
  TestWorld world(GetParam(), 2);
  Submitted a = start(world, 0, 1, 0), b = start(world, 1, 1, 1);
  for (Submitted* one : {&a, &b}) {
    const std::optional<Error> error = one->error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind, ErrorKind::kMismatchError) << error->message;
  }
}

// Rank 1 skips a call and is already in its next launch: no need to wait for the deadline.
TEST_P(Failures, ARankInALaterLaunchIsAMismatchAtOnce) {
  TestWorld world(GetParam(), 4);
  const Clock::time_point begin = Clock::now();
  std::vector<Submitted> skipped, common;
  for (int rank = 0; rank < 4; ++rank) {
    if (rank != 1) skipped.push_back(start(world, rank, 1, 0));
    common.push_back(start(world, rank, 1, 1));
  }
  for (Submitted& one : common) ASSERT_FALSE(one.error());
  Submitted ahead = start(world, 1, 2, 0);
  for (Submitted& one : skipped) {
    const std::optional<Error> error = one.error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind, ErrorKind::kMismatchError) << error->message;
    EXPECT_NE(error->message.find("allreduce #0 of launch 0"), std::string::npos) << error->message;
  }
  EXPECT_LT(seconds_since(begin), 60.0);
}

// The same, but the others reach the call only after rank 1 has passed it.
TEST_P(Failures, ACallThatARankHasPassedIsAMismatchAtOnce) {
  TestWorld world(GetParam(), 4);
  const Clock::time_point begin = Clock::now();
  std::vector<Submitted> common, skipped;
  for (int rank = 0; rank < 4; ++rank) common.push_back(start(world, rank, 1, 0));
  for (Submitted& one : common) ASSERT_FALSE(one.error());
  Submitted ahead = start(world, 1, 2, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the others hear of it
  for (int rank : {0, 2, 3}) skipped.push_back(start(world, rank, 1, 1));
  for (Submitted& one : skipped) {
    const std::optional<Error> error = one.error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->kind, ErrorKind::kMismatchError) << error->message;
    EXPECT_NE(error->message.find("allreduce #1 of launch 0"), std::string::npos) << error->message;
  }
  EXPECT_LT(seconds_since(begin), 60.0);
}

TEST_P(Failures, AbortWakesAllAndStays) {
  TestWorld world(GetParam(), 4);
  Submitted a = start(world, 0, 1, 0), b = start(world, 1, 1, 0), c = start(world, 2, 1, 0);
  Error reason;
  reason.kind = ErrorKind::kAbortedError;
  reason.message = "the test says so";
  world.of_rank(3).fail(reason);
  for (Submitted* one : {&a, &b, &c}) {
    const std::optional<Error> error = one->error();
    ASSERT_TRUE(error);
    EXPECT_EQ(error->text(), "jaxring.AbortedError: the test says so");
  }
  const std::optional<Error> later = start(world, 3, 2, 0).error();
  ASSERT_TRUE(later);
  EXPECT_EQ(later->kind, ErrorKind::kAbortedError);
}

TEST(Settings, ALongTimeIsNoShortOne) {
  for (double timeout_s : {1e12, 1e300}) {
    settings().timeout_s = timeout_s;
    EXPECT_GT(Clock::now() + settings().timeout(), Clock::now() + std::chrono::hours(24));
  }
  settings().timeout_s = 300;
}

// One process: an error costs its launch, not the communicator.
TEST(FailuresInOneProcess, TheNextLaunchWorks) {
  settings().timeout_s = 0.2;
  TestWorld world(Layout::kDevices, 2);
  std::vector<float> in(4, 1.0f), out(8);
  auto request = [&](int rank, uint64_t run_id) {
    Request r;
    r.info = make_info(Algorithm::kAuto, ReduceOp::kSum, DType::kFloat32, 4);
    r.rank = rank;
    r.run_id = run_id;
    r.input.add(in.data(), 4);
    r.output.add(out.data() + 4 * rank, 4);
    return r;
  };
  const std::optional<Error> error = Submitted::start(world.of_rank(0), request(0, 1)).error();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::kTimeoutError);
  // Rank 1 comes too late to the failed launch: the same error, at once.
  const std::optional<Error> late = Submitted::start(world.of_rank(1), request(1, 1)).error();
  ASSERT_TRUE(late);
  EXPECT_EQ(late->message, error->message);
  settings().timeout_s = 300;
  Submitted a = Submitted::start(world.of_rank(0), request(0, 2));
  Submitted b = Submitted::start(world.of_rank(1), request(1, 2));
  EXPECT_FALSE(a.error());
  EXPECT_FALSE(b.error());
  EXPECT_EQ(out[0], 2.0f);
  EXPECT_EQ(out[7], 2.0f);
}

// A device with one open launch cannot begin another: two Python threads use one communicator.
TEST(FailuresInOneProcess, OverlappingLaunchesOfOneRankAreRefused) {
  TestWorld world(Layout::kProcesses, 2);
  std::vector<float> in(4, 1.0f), out(4);
  auto request = [&](uint64_t run_id) {
    Request r;
    r.info = make_info(Algorithm::kAuto, ReduceOp::kSum, DType::kFloat32, 4);
    r.run_id = run_id;
    r.input.add(in.data(), 4);
    r.output.add(out.data(), 4);
    return r;
  };
  Submitted first = Submitted::start(world.of_rank(0), request(1));
  const std::optional<Error> error = Submitted::start(world.of_rank(0), request(2)).error();
  ASSERT_TRUE(error);
  EXPECT_EQ(error->kind, ErrorKind::kUsageError);
  EXPECT_NE(error->message.find("still inside another launch"), std::string::npos);
  world.of_rank(0).close();
  EXPECT_EQ(first.error()->kind, ErrorKind::kAbortedError);
}

INSTANTIATE_TEST_SUITE_P(Layouts, Failures, ::testing::ValuesIn(all_layouts()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace jaxring::testing
