// How the CUDA kernels end when a peer does not come, on emulated GPUs.
#include <cmath>

#include "cuda_reference.h"

namespace jaxring::testing {
namespace {

using Types = cuda::DTypeList<float, int32_t>;

constexpr int kRanks = 3;
constexpr int kAbsent = 2;
constexpr int kSite = 5;

Road road_of(Algorithm algorithm, cuda::Method method = cuda::Method::kBySize) {
  return Road{Collective::kAllreduce, algorithm, method};
}

class CudaFailures : public ::testing::TestWithParam<Road> {
 protected:
  CudaFailures() : random_(1) { world_.timeout_ns = 300'000'000; }

  template <typename T>
  TypedCall<T> call(int64_t count = 100) {
    TypedCall<T> call(GetParam(), ReduceOp::kSum, kRanks, count, random_);
    call.emulated.call.site = kSite;
    return call;
  }

  std::mt19937 random_;
  EmulatedWorld world_{kRanks, 2, 2};
};

float element(EmulatedCall& call, int rank, int i) {
  float value;
  std::memcpy(&value, call.output(rank) + i * sizeof(float), sizeof(value));
  return value;
}

TEST_P(CudaFailures, TheDeadlineNamesThePeerAndPoisonsTheResult) {
  world_.timeout_ns = 1'000'000'000;  // long enough for all that are there to come, on any machine
  auto late = call<float>();
  world_.run<Types>(late.emulated, kAbsent);
  bool named = false;
  for (int rank = 0; rank < kRanks - 1; ++rank) {
    const uint64_t status = world_.statuses[rank];
    ASSERT_NE(status, 0u);
    EXPECT_EQ(cuda::site_in(status), kSite);
    EXPECT_EQ(world_.stalls[rank], 0u);  // warn_ns is 0
    named = named || cuda::peer_in(status) == kAbsent;
    int nans = 0;
    for (int i = 0; i < 100; ++i) nans += std::isnan(element(late.emulated, rank, i));
    EXPECT_GT(nans, 0);
  }
  EXPECT_TRUE(named);

  // All are there again, but flags and FIFOs are out of step: NaN, at once.
  world_.timeout_ns = 60'000'000'000;
  auto again = call<float>();
  const auto begin = std::chrono::steady_clock::now();
  world_.run<Types>(again.emulated, kAbsent);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  for (int i = 0; i < 100; ++i) EXPECT_TRUE(std::isnan(element(again.emulated, 0, i)));
}

TEST_P(CudaFailures, ALongWaitIsToldBeforeItFails) {
  world_.warn_ns = 20'000'000;
  auto late = call<float>();
  world_.run<Types>(late.emulated, kAbsent);
  bool named = false;
  for (int rank = 0; rank < kRanks - 1; ++rank) {
    const uint64_t stall = world_.stalls[rank];
    EXPECT_EQ(cuda::site_in(stall), kSite);
    named = named || (stall != 0 && cuda::peer_in(stall) == kAbsent);
  }
  EXPECT_TRUE(named);
  const cuda::CallLog& log = *world_.arena(0).log();
  EXPECT_EQ(log.begun, 1u);
  EXPECT_EQ(log.site, static_cast<uint64_t>(kSite));
}

TEST_P(CudaFailures, AnAbortEndsTheWait) {
  world_.timeout_ns = 12'000'000'000;
  std::atomic_ref(world_.abort).store(1);
  auto aborted = call<int32_t>();
  const auto begin = std::chrono::steady_clock::now();
  world_.run<Types>(aborted.emulated, kAbsent);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(9));
  EXPECT_NE(world_.statuses[0], 0u);
}

TEST_P(CudaFailures, TheFirstStatusStays) {
  const uint64_t first = cuda::wait_status(3, 7);  // of an earlier call, say
  world_.statuses[0] = first;
  auto late = call<float>();
  world_.run<Types>(late.emulated, kAbsent);
  EXPECT_EQ(world_.statuses[0], first);
}

INSTANTIATE_TEST_SUITE_P(Roads, CudaFailures,
                         ::testing::Values(road_of(Algorithm::kDirect, cuda::Method::kPackets),
                                           road_of(Algorithm::kDirect, cuda::Method::kOneShot),
                                           road_of(Algorithm::kDirect, cuda::Method::kTwoShot),
                                           road_of(Algorithm::kDirect, cuda::Method::kMultimem),
                                           road_of(Algorithm::kRing), road_of(Algorithm::kTree)),
                         [](const auto& info) {
                           std::string name = info.param.name();
                           std::replace_if(
                               name.begin(), name.end(), [](char c) { return !std::isalnum(c); },
                               '_');
                           return name;
                         });

}  // namespace
}  // namespace jaxring::testing
