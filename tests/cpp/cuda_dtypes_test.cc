// Every dtype and operation of the CUDA kernels on emulated GPUs, by each of the direct methods:
// the three give the same bits, which are those of a rank-order sum, rounded once.
#include <cmath>

#include "cuda_reference.h"

namespace jaxring::testing {
namespace {

// The list ends in a comma; the last one, which is there twice, is found at its first place.
#define JR_X(enumerator, name, storage, accumulator) storage,
using AllTypes = cuda::DTypeList<JR_FOR_EACH_DTYPE(JR_X) float>;
#undef JR_X

template <typename T>
void check_all(int world_size) {
  EmulatedWorld world(world_size, 2, 2);
  std::mt19937 random(world_size);
  for (int op = 0; op < kReduceOpCount; ++op) {
    if (!supports(static_cast<ReduceOp>(op), DTypeTraits<T>::dtype)) continue;
    for (const Road& road : all_roads()) {
      if (!reduces(road.collective) || !road.rank_order()) continue;
      for (const int64_t count : {int64_t{3}, 33 * int64_t{4} / static_cast<int64_t>(sizeof(T))}) {
        TypedCall<T> call(road, static_cast<ReduceOp>(op), world_size, count, random);
        if (!world.serves(call.emulated.call)) continue;
        world.run<AllTypes>(call.emulated);
        call.check(call.emulated);
        if (::testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

class CudaDTypes : public ::testing::TestWithParam<DType> {};

TEST_P(CudaDTypes, EveryOperationInRankOrder) {
  visit_dtype(GetParam(), [](auto storage) {
    check_all<decltype(storage)>(2);
    if (!::testing::Test::HasFatalFailure()) check_all<decltype(storage)>(5);
  });
}

std::vector<DType> all_dtypes() {
  std::vector<DType> result;
  for (int i = 0; i < kDTypeCount; ++i) result.push_back(static_cast<DType>(i));
  return result;
}

INSTANTIATE_TEST_SUITE_P(All, CudaDTypes, ::testing::ValuesIn(all_dtypes()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// What only moves is bytes, but a NaN after a failure has a dtype.
TEST(CudaPlan, PoisonIsNaN) {
  for (const DType dtype : all_dtypes()) {
    visit_dtype(dtype, [&](auto storage) {
      using T = decltype(storage);
      if constexpr (is_float_v<T>) {
        T value;
        std::memset(&value, cuda::poison_of(dtype), sizeof(value));
        EXPECT_TRUE(std::isnan(static_cast<AccumulatorOf<T>>(value))) << name_of(dtype);
      }
    });
  }
}

TEST(CudaPlan, RefusesWhatCannotRun) {
  const auto refusal = [](const cuda::KernelCall& call, int world_size) {
    return cuda::refusal_of(call, world_size, cuda::kArenaShape).value_or("");
  };
  cuda::KernelCall call;
  call.count = 10;
  EXPECT_EQ(refusal(call, 8), "");
  EXPECT_NE(refusal(call, 33).find("33"), std::string::npos);
  call.collective = Collective::kReduceScatter;
  EXPECT_NE(refusal(call, 4).find("10 elements can't be cut into 4"), std::string::npos);
  call = {};
  call.op = ReduceOp::kAnd;
  EXPECT_NE(refusal(call, 2).find("no meaning"), std::string::npos);
  call = {};
  call.count = 1 << 20;
  call.method = cuda::Method::kPackets;
  EXPECT_NE(refusal(call, 2).find("packets"), std::string::npos);
  call = {};
  call.collective = Collective::kBroadcast;
  call.root = 2;
  EXPECT_NE(refusal(call, 2).find("root 2"), std::string::npos);
  call = {};
  call.algorithm = Algorithm::kTree;
  call.max_blocks = 1;
  EXPECT_NE(refusal(call, 2).find("max_blocks"), std::string::npos);
}

TEST(CudaPlan, RoadsBySize) {
  const auto road = [](int64_t count, int world_size, bool deterministic) {
    cuda::KernelCall call;
    call.count = count;
    call.deterministic = deterministic;
    return cuda::plan_of(call, world_size, cuda::kArenaShape).road;
  };
  EXPECT_EQ(road(1, 1, true), cuda::Road::kLocal);
  EXPECT_EQ(road(1 << 10, 8, true), cuda::Road::kPackets);
  EXPECT_EQ(road(1 << 15, 8, true), cuda::Road::kOneShot);
  EXPECT_EQ(road(1 << 20, 8, true), cuda::Road::kTwoShot);
  EXPECT_EQ(road(1 << 24, 8, true), cuda::Road::kTwoShot);
  EXPECT_EQ(road(1 << 24, 8, false), cuda::Road::kSchedule);
  EXPECT_EQ(road(1 << 24, 2, true), cuda::Road::kOneShot);
}

TEST(CudaPlan, MultimemOnlyWhereNoOrderIsAskedFor) {
  cuda::KernelCall call;
  call.count = 1 << 24;
  call.multimem = true;
  call.deterministic = false;
  const auto road = [&](int world_size = 8) {
    return cuda::plan_of(call, world_size, cuda::kArenaShape).road;
  };
  EXPECT_EQ(road(), cuda::Road::kMultimem);
  EXPECT_EQ(road(2), cuda::Road::kSchedule);
  call.deterministic = true;
  EXPECT_EQ(road(), cuda::Road::kTwoShot);
  call.deterministic = false;
  call.algorithm = Algorithm::kDirect;  // is in rank order
  EXPECT_EQ(road(), cuda::Road::kTwoShot);
  call.algorithm = Algorithm::kAuto;
  call.dtype = DType::kBFloat16;
  EXPECT_EQ(road(), cuda::Road::kMultimem);
  call.op = ReduceOp::kMean;  // would be rounded twice
  EXPECT_EQ(road(), cuda::Road::kSchedule);
  call.op = ReduceOp::kMax;
  EXPECT_EQ(road(), cuda::Road::kSchedule);
  call = {};
  call.method = cuda::Method::kMultimem;
  EXPECT_NE(cuda::refusal_of(call, 8, cuda::kArenaShape).value_or("").find("multicast"),
            std::string::npos);
}

}  // namespace
}  // namespace jaxring::testing
