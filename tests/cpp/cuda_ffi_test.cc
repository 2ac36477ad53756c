// The handlers for platform CUDA, from Prepare to the result, over fake GPUs, a fake NCCL and a
// fake Collectives extension.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cmath>
#include <functional>

#include "tests/cpp/cuda_fixture.h"
#include "xla_ffi/communicator/events.h"
#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/cuda_ffi/seats.h"
#include "xla_ffi/cuda_ffi/watchdog.h"

namespace jaxring::cuda {
namespace {

TEST_F(CudaFfi, ACliqueIsAskedForAndUsed) {
  for (int32_t minor : {1, 2}) {
    Program program(4, attributes_of(4), true, minor);
    ASSERT_EQ(program.instantiate(), "");
    for (int run = 0; run < 3; ++run) expect_sums(program, 4, 7);
    EXPECT_EQ(program.collectives(3).requested, (std::vector<std::vector<int64_t>>{{0, 1, 2, 3}}));
  }
  EXPECT_GE(machine().loads, 4);  // before any launch, on every device
}

TEST_F(CudaFfi, ExecuteIsFitForCommandBuffersAndTheOthersClaimNothing) {
  EXPECT_EQ(fake_xla::traits_of(jaxring_cuda_execute),
            XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
  EXPECT_EQ(fake_xla::traits_of(jaxring_cuda_initialize), 0u);
}

TEST_F(CudaFfi, BetweenHostsNcclCarriesEachPartAlongItsRail) {
  machine().host = [](int device) { return uint64_t(device / 2); };
  const int splits = fake::nccl_counts().splits;
  Program program(4, attributes_of(4));
  ASSERT_EQ(program.instantiate(), "");
  const int launches = machine().launches;
  const int reduces = fake::nccl_counts().all_reduces;
  for (int run = 0; run < 2; ++run) expect_sums(program, 4, 7);  // 7 is odd: a remainder
  EXPECT_EQ(fake::nccl_counts().splits - splits, 4);
  EXPECT_EQ(machine().launches - launches, 2 * 4 * 2);              // reduce-scatter and all-gather
  EXPECT_EQ(fake::nccl_counts().all_reduces - reduces, 2 * 4 * 2);  // parts and remainder
}

TEST_F(CudaFfi, WhatCannotBeMappedGoesByNccl) {
  machine().peers = [](int, int) { return false; };
  Program program(3, attributes_of(3));
  ASSERT_EQ(program.instantiate(), "");
  const int launches = machine().launches;
  expect_sums(program, 3, 5);
  EXPECT_EQ(machine().launches, launches);
  const std::optional<Event> note = Events::instance().next(0);
  ASSERT_TRUE(note.has_value());
  EXPECT_EQ(note->kind, "note");
  EXPECT_NE(note->text.find("goes by nccl, since rank 0 (pid "), std::string::npos) << note->text;
}

TEST_F(CudaFfi, NcclDoesNotSumInRankOrder) {
  machine().peers = [](int, int) { return false; };
  Attributes attributes = attributes_of(2);
  attributes.flag("deterministic", true);
  Program program(2, attributes);
  ASSERT_EQ(program.instantiate(), "");
  std::vector<std::vector<float>> outputs(2, std::vector<float>(4));
  for (const std::string& error : program.run_all(numbers(2, 4), &outputs)) {
    EXPECT_NE(error.find("jaxring.UsageError: allreduce: deterministic=True"), std::string::npos);
    EXPECT_NE(error.find("cannot map the memory of rank 1"), std::string::npos) << error;
  }
}

TEST_F(CudaFfi, VersionsOfTheExtension) {
  const auto why = [](const fake_xla::Api& api, const fake_xla::Collectives* collectives) {
    XLA_FFI_ExecutionContext context;
    if (collectives != nullptr) context.extension = &collectives->extension;
    return find_cliques(&api.api, &context).why_not();
  };
  const fake_xla::Api old(false), current(true);
  const fake_xla::Collectives first(1), second(2), third(3), other(1, 1);
  EXPECT_EQ(why(current, &first), "");
  EXPECT_EQ(why(current, &second), "");
  EXPECT_NE(why(current, &third).find("version 0.3, but 0.1 to 0.2"), std::string::npos);
  EXPECT_NE(why(current, &other).find("version 1.1"), std::string::npos);
  EXPECT_NE(why(current, nullptr).find("offers no collectives extension"), std::string::npos);
  EXPECT_NE(why(old, &first).find("0.11.2 is the first"), std::string::npos);
}

TEST_F(WithoutCliques, TheLoweringsCommunicatorIsUsed) {
  const std::string key = set_up(4, 40);
  EXPECT_EQ(Seats::instance().state(key), "ready");
  Program program(4, tables(4, 40), /*has_cliques=*/false);
  ASSERT_EQ(program.instantiate(), "");
  for (int run = 0; run < 3; ++run) expect_sums(program, 4, 6);
  Seats::instance().close(key);
  EXPECT_EQ(Seats::instance().state(key), "missing");
}

TEST_F(WithoutCliques, WhatNobodyHasSetUpSaysSo) {
  Program program(2, tables(2, 50), false);
  ASSERT_EQ(program.instantiate(), "");
  std::vector<float> output(1);
  EXPECT_NE(program.run(0, {1}, &output).find("communicator mesh:50,51 has not been set up"),
            std::string::npos);
  Program abstract(2, attributes_of(2), false);
  ASSERT_EQ(abstract.instantiate(), "");
  const std::string error = abstract.run(0, {1}, &output);
  EXPECT_NE(error.find("does not say which rank GPU 0 is"), std::string::npos) << error;
  EXPECT_NE(error.find("0.11.2 is the first"), std::string::npos) << error;
}

TEST_F(WithoutCliques, GpusThatCannotReachEachOtherAreAnError) {
  machine().peers = [](int, int) { return false; };
  try {
    set_up(2, 60);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("cannot map the memory"), std::string::npos);
  }
}

TEST_F(WithoutCliques, RanksThatMakeDifferentCallsAreTold) {
  const std::string key = set_up(2, 70);
  Program program(2, tables(2, 70), false);
  program.attributes(1).text("op", "max");
  program.attributes(1).text("name", "mine");
  ASSERT_EQ(program.instantiate(), "");
  program.give_own_site(1);
  std::vector<std::vector<float>> outputs(2, std::vector<float>(1));
  for (const std::string& error : program.run_all({{1}, {2}}, &outputs)) {
    EXPECT_NE(error.find("jaxring.MismatchError: ranks of communicator " + key), std::string::npos);
    EXPECT_NE(error.find("rank 0: allreduce(sum"), std::string::npos) << error;
    EXPECT_NE(error.find("rank 1: allreduce(max"), std::string::npos) << error;
  }
  Seats::instance().close(key);
}

TEST_F(WithoutCliques, ARankThatNeverComesIsNamedInTheFirstRun) {
  settings().timeout_s = 0.3;
  const std::string key = set_up(3, 80);
  Program program(3, tables(3, 80), false);
  ASSERT_EQ(program.instantiate(), "");
  std::vector<float> one(1), two(1);
  std::string error;
  std::thread other([&] { program.run(1, {2}, &two); });
  error = program.run(0, {1}, &one);
  other.join();
  EXPECT_NE(error.find("jaxring.TimeoutError: communicator " + key), std::string::npos) << error;
  EXPECT_NE(error.find("missing rank 2 (pid "), std::string::npos) << error;
  Seats::instance().close(key);
}

TEST_F(WithoutCliques, AKernelThatGaveUpIsToldAtTheNextHostCheck) {
  const std::string key = set_up(2, 90);
  Program program(2, tables(2, 90), false);
  ASSERT_EQ(program.instantiate(), "");
  expect_sums(program, 2, 3);
  settings().timeout_s = 0.2;
  std::vector<float> output(3);
  EXPECT_EQ(program.run(0, {1, 2, 3}, &output), "");  // enqueued; the kernel waits for rank 1
  Watchdog::instance().look();
  bool logged = false;
  while (auto event = Events::instance().next(0)) {
    logged = logged || event->text.find("missing rank 1") != std::string::npos;
  }
  EXPECT_TRUE(logged);
  const std::string error = program.run(0, {1, 2, 3}, &output);
  EXPECT_NE(error.find("jaxring.TimeoutError: communicator " + key), std::string::npos) << error;
  const std::optional<Error> typed =
      Registry::instance().recall(error.substr(error.find(": ") + 2));
  ASSERT_TRUE(typed.has_value());
  EXPECT_EQ(typed->missing_ranks, std::vector<int>{1});
  Seats::instance().close(key);
}

TEST_F(WithoutCliques, AProcessThatEndsStopsKernelsThatWaitForIt) {
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  // Rank 1 is of that process, as far as its card says, and its memory comes by an IPC handle.
  machine().pid = [&](int device) { return device == 1 ? int64_t{child} : int64_t{getpid()}; };
  const std::string key = set_up(2, 100);
  Program program(2, tables(2, 100), false);
  ASSERT_EQ(program.instantiate(), "");
  expect_sums(program, 2, 3);
  std::vector<float> output(3);
  std::string error = "not yet";
  std::thread waiting([&] { error = program.run(0, {1, 2, 3}, &output); });  // for rank 1, 20 s
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  const auto begin = std::chrono::steady_clock::now();
  waiting.join();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  error = program.run(0, {1, 2, 3}, &output);
  EXPECT_NE(error.find("jaxring.PeerError: communicator " + key + ": the process of rank 1 (pid " +
                       std::to_string(child)),
            std::string::npos)
      << error;
  Seats::instance().close(key);
}

TEST_F(WithoutCliques, AnAbortReachesCallsAndKernels) {
  const std::string key = set_up(2, 110);
  Program program(2, tables(2, 110), false);
  ASSERT_EQ(program.instantiate(), "");
  expect_sums(program, 2, 3);
  Error error;
  error.kind = ErrorKind::kAbortedError;
  error.message = "enough";
  std::vector<float> output(3);
  std::thread waiting([&] { program.run(0, {1, 2, 3}, &output); });
  Seats::instance().fail(key, error);
  waiting.join();
  EXPECT_EQ(program.run(1, {1, 2, 3}, &output), "jaxring.AbortedError: enough");
  Seats::instance().close(key);
}

}  // namespace
}  // namespace jaxring::cuda
