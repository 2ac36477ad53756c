#include "xla_ffi/core/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "reference.h"
#include "xla_ffi/core/reduce_op.h"

namespace jaxring {
namespace {

TEST(DType, EveryNameFindsItsType) {
  for (int i = 0; i < kDTypeCount; ++i) {
    const DType dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(name_of(dtype)), dtype);
    EXPECT_GE(accumulator_size_of(dtype), size_of(dtype));
  }
  EXPECT_EQ(dtype_from_name("float128"), std::nullopt);
  EXPECT_EQ(dtype_from_name(""), std::nullopt);
}

TEST(DType, SizesAreThoseOfTheNames) {
  EXPECT_EQ(size_of(DType::kBool), 1u);
  EXPECT_EQ(size_of(DType::kInt16), 2u);
  EXPECT_EQ(size_of(DType::kBFloat16), 2u);
  EXPECT_EQ(size_of(DType::kFloat8E5M2), 1u);
  EXPECT_EQ(size_of(DType::kComplex64), 8u);
  EXPECT_EQ(accumulator_size_of(DType::kFloat16), 4u);
  EXPECT_EQ(accumulator_size_of(DType::kInt8), 1u);
}

TEST(ReduceOp, EveryNameFindsItsOp) {
  for (int i = 0; i < kReduceOpCount; ++i) {
    const ReduceOp op = static_cast<ReduceOp>(i);
    EXPECT_EQ(reduce_op_from_name(name_of(op)), op);
  }
  EXPECT_EQ(reduce_op_from_name("xor"), std::nullopt);
}

TEST(ReduceOp, SupportsWhatHasAMeaning) {
  EXPECT_TRUE(supports(ReduceOp::kAnd, DType::kBool));
  EXPECT_FALSE(supports(ReduceOp::kAnd, DType::kInt32));
  EXPECT_FALSE(supports(ReduceOp::kSum, DType::kBool));
  EXPECT_TRUE(supports(ReduceOp::kSum, DType::kUInt8));
  EXPECT_FALSE(supports(ReduceOp::kMean, DType::kInt32));
  EXPECT_TRUE(supports(ReduceOp::kMean, DType::kComplex64));
  EXPECT_FALSE(supports(ReduceOp::kMin, DType::kComplex128));
  EXPECT_TRUE(supports(ReduceOp::kMax, DType::kFloat8E4M3Fn));
}

template <typename T>
class SmallFloatTest : public testing::Test {};
using SmallFloats = testing::Types<Float16, BFloat16, Float8E3M4, Float8E4M3, Float8E4M3Fn,
                                   Float8E4M3Fnuz, Float8E4M3B11Fnuz, Float8E5M2, Float8E5M2Fnuz>;
TYPED_TEST_SUITE(SmallFloatTest, SmallFloats);

template <typename T>
constexpr uint32_t code_count() {
  return 1u << (8 * sizeof(T));
}

TYPED_TEST(SmallFloatTest, DecodesEveryCode) {
  const reference::Format format(name_of(DTypeTraits<TypeParam>::dtype));
  for (uint32_t code = 0; code < code_count<TypeParam>(); ++code) {
    const TypeParam value = TypeParam::from_bits(code);
    ASSERT_TRUE(reference::same(static_cast<float>(value), static_cast<float>(format.decode(code))))
        << "code " << code << " gives " << static_cast<float>(value);
  }
}

TYPED_TEST(SmallFloatTest, EveryCodeSurvivesTheRoundTrip) {
  for (uint32_t code = 0; code < code_count<TypeParam>(); ++code) {
    const TypeParam value = TypeParam::from_bits(code);
    const TypeParam back = TypeParam(static_cast<float>(value));
    ASSERT_TRUE(reference::same(value, back)) << "code " << code << " became " << +back.bits;
  }
}

template <typename T>
void expect_rounding(float value) {
  const float expected = static_cast<float>(reference::rounding_to<T>()(value));
  const float actual = static_cast<float>(T(value));
  ASSERT_TRUE(reference::same(actual, expected))
      << value << " became " << actual << " and not " << expected;
}

// Every number, every middle between two neighbours, and the floats just beside each, with both
// signs.
TYPED_TEST(SmallFloatTest, RoundsToNearestEven) {
  std::vector<double> points = reference::rounding_to<TypeParam>().magnitudes();
  points.push_back(2 * points.back() - points[points.size() - 2]);  // the first that overflows
  for (size_t i = 0; i + 1 < points.size(); ++i) {
    const float middle = static_cast<float>((points[i] + points[i + 1]) / 2);
    for (const float center : {static_cast<float>(points[i]), middle}) {
      for (const float value :
           {center, std::nextafter(center, HUGE_VALF), std::nextafter(center, -HUGE_VALF)}) {
        expect_rounding<TypeParam>(value);
        expect_rounding<TypeParam>(-value);
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

TYPED_TEST(SmallFloatTest, RoundsAnyFloat) {
  std::mt19937 random(1);
  for (int i = 0; i < 300'000 && !this->HasFatalFailure(); ++i) {
    const uint32_t bits = random();
    expect_rounding<TypeParam>(bit_cast<float>(bits));
  }
  for (const float value : {HUGE_VALF, -HUGE_VALF, 1e-45f, -1e-45f, 3.4e38f, -3.4e38f}) {
    expect_rounding<TypeParam>(value);
  }
  for (const uint32_t nan : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u, 0x7fffffffu}) {
    EXPECT_TRUE(std::isnan(static_cast<float>(TypeParam(bit_cast<float>(nan))))) << std::hex << nan;
  }
}

}  // namespace
}  // namespace jaxring
