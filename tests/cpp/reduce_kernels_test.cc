#include "xla_ffi/host/reduce_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "reference.h"
#include "xla_ffi/host/reduce_kernels_table.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxring {
namespace {

std::vector<CpuLevel> levels() {
  int count;
  const CpuLevel* list = cpu_levels(&count);
  return {list, list + count};
}

// An element of T: mostly ordinary numbers, every eighth one with any bits at all (NaNs,
// infinities, denormals, negative zeros, the largest integers).
template <typename T>
T random_element(std::mt19937_64& random) {
  const uint64_t bits = random();
  if constexpr (is_complex_v<T>) {
    using Part = decltype(T::re);
    return {random_element<Part>(random), random_element<Part>(random)};
  } else if constexpr (std::is_same_v<T, bool>) {
    return bits & 1;
  } else {
    T element;
    std::memcpy(&element, &bits, sizeof(T));
    if constexpr (is_float_v<T>) {
      const int kind = bits >> 60;
      if (kind == 0) return T(-0.0f);
      if (kind > 2) return T(static_cast<float>(static_cast<int64_t>(bits) >> 40) / (1 << 21));
    }
    return element;
  }
}

// An array at an address that is no multiple of more than its element, between two fences.
template <typename T>
class Array {
 public:
  explicit Array(int64_t count, int offset = 1)
      : bytes_((count + kFence + offset) * sizeof(T), 0xa5), count_(count), offset_(offset) {}

  T* data() { return reinterpret_cast<T*>(bytes_.data()) + offset_; }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.data()) + offset_; }
  bool fences_intact() const {
    const auto intact = [](unsigned char byte) { return byte == 0xa5; };
    return std::all_of(bytes_.begin(), bytes_.begin() + offset_ * sizeof(T), intact) &&
           std::all_of(bytes_.begin() + (offset_ + count_) * sizeof(T), bytes_.end(), intact);
  }

 private:
  static constexpr int kFence = 8;
  std::vector<unsigned char> bytes_;
  int64_t count_;
  int offset_;
};

struct Case {
  ReduceOp op;
  int operand_count;
  int64_t count;
  unsigned partial_operands;  // a bit per operand
  bool dst_partial;
  int64_t divisor;
  int dst_alias;  // the operand that is also the destination, or -1

  std::string text(const char* level, DType dtype) const {
    return std::string(level) + " " + name_of(dtype) + " " + name_of(op) +
           " operands=" + std::to_string(operand_count) + " count=" + std::to_string(count) +
           " partial=" + std::to_string(partial_operands) + (dst_partial ? " to partial" : "") +
           " divisor=" + std::to_string(divisor) + " alias=" + std::to_string(dst_alias);
  }
};

template <typename T>
class Checker {
 public:
  using A = AccumulatorOf<T>;

  void run(const Case& c) {
    for (const CpuLevel& level : levels()) {
      SCOPED_TRACE(c.text(level.name, DTypeTraits<T>::dtype));
      if (c.dst_partial) {
        run<A>(c, level);
      } else {
        run<T>(c, level);
      }
      if (testing::Test::HasFatalFailure()) return;
    }
  }

 private:
  template <typename D>
  void run(const Case& c, const CpuLevel& level) {
    std::vector<Array<T>> own;
    std::vector<Array<A>> partial;
    std::vector<Operand> operands;
    for (int i = 0; i < c.operand_count; ++i) {
      own.emplace_back(c.count, i % 3);
      partial.emplace_back(c.count, i % 3);
      const bool is_partial = c.partial_operands >> i & 1;
      for (int64_t j = 0; j < c.count; ++j) {
        own[i].data()[j] = random_element<T>(random_);
        partial[i].data()[j] = random_element<A>(random_);
      }
      operands.push_back(is_partial ? Operand{partial[i].data(), true}
                                    : Operand{own[i].data(), false});
    }
    Array<D> expected(c.count);
    for (int64_t j = 0; j < c.count; ++j) {
      A sum{};
      for (int i = 0; i < c.operand_count; ++i) {
        const A next =
            operands[i].partial ? partial[i].data()[j] : static_cast<A>(own[i].data()[j]);
        sum = i == 0 ? next : reference::combine<A>(c.op, sum, next);
      }
      expected.data()[j] = finished<D>(c, sum);
    }

    Array<D> dst(c.count, 2);
    void* target = dst.data();
    if (c.dst_alias >= 0) target = const_cast<void*>(operands[c.dst_alias].data);
    fold_with(*level.kernels, DTypeTraits<T>::dtype, c.op, operands.data(), c.operand_count, target,
              c.dst_partial, c.count, c.divisor);
    for (int64_t j = 0; j < c.count; ++j) {
      ASSERT_TRUE(reference::same(static_cast<const D*>(target)[j], expected.data()[j]))
          << "element " << j;
    }
    EXPECT_TRUE(dst.fences_intact());
    for (const auto& array : own) EXPECT_TRUE(array.fences_intact());
    for (const auto& array : partial) EXPECT_TRUE(array.fences_intact());
  }

  template <typename D>
  static D finished(const Case& c, A sum) {
    if (c.dst_partial) return static_cast<D>(sum);
    if constexpr (Mean::supports<T>) {
      if (c.op == ReduceOp::kMean) sum = reference::divided(sum, c.divisor);
    }
    if constexpr (reference::is_small_float_v<T>) {
      return static_cast<D>(static_cast<float>(reference::rounding_to<T>()(sum)));
    } else {
      return static_cast<D>(sum);
    }
  }

  std::mt19937_64 random_{7};
};

class FoldTest : public testing::TestWithParam<DType> {
 protected:
  // Calls f(checker, op) for each op with a meaning for the dtype, until something fails.
  template <typename F>
  void for_each_op(F&& f) {
    visit_dtype(GetParam(), [&](auto storage) {
      Checker<decltype(storage)> checker;
      for (int i = 0; i < kReduceOpCount && !HasFailure(); ++i) {
        if (supports(static_cast<ReduceOp>(i), GetParam())) f(checker, static_cast<ReduceOp>(i));
      }
    });
  }
};

constexpr int64_t kCounts[] = {0,  1,    7,
                               64, 1000, 2053};  // 2053: a prime, and three blocks of floats

TEST_P(FoldTest, CombinesInOrderAndRoundsOnce) {
  for_each_op([&](auto& checker, ReduceOp op) {
    for (int operands = 1; operands <= 5; ++operands) {
      const unsigned all = (1u << operands) - 1;
      for (const int64_t count : kCounts) {
        for (const unsigned partial : {0u, all, all & 1u, all & 22u}) {
          for (const bool to_partial : {false, true}) {
            checker.run({op, operands, count, partial, to_partial, operands, -1});
            if (HasFailure()) return;
          }
        }
      }
    }
  });
}

TEST_P(FoldTest, DividesByAnyDivisor) {
  for_each_op([&](auto& checker, ReduceOp op) {
    for (const int64_t divisor : {1, 2, 3, 1 << 20}) {
      for (const int operands : {1, 2, 3}) {
        for (const unsigned partial : {0u, 1u}) {
          checker.run({op, operands, 100, partial, false, divisor, -1});
        }
      }
    }
  });
}

TEST_P(FoldTest, WritesOverAnyOperand) {
  const bool has_own_accumulator = size_of(GetParam()) == accumulator_size_of(GetParam());
  for_each_op([&](auto& checker, ReduceOp op) {
    for (int operands = 1; operands <= 4; ++operands) {
      for (int alias = 0; alias < operands; ++alias) {
        for (const int64_t count : {5, 2053}) {
          for (const bool to_partial : {false, true}) {
            const unsigned partial = to_partial && !has_own_accumulator ? 1u << alias : 0u;
            checker.run({op, operands, count, partial, to_partial, operands, alias});
          }
        }
      }
    }
  });
}

std::vector<DType> all_dtypes() {
  std::vector<DType> dtypes;
  for (int i = 0; i < kDTypeCount; ++i) dtypes.push_back(static_cast<DType>(i));
  return dtypes;
}
INSTANTIATE_TEST_SUITE_P(All, FoldTest, testing::ValuesIn(all_dtypes()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// The levels convert by instructions of their own, so the numbers that dtype_test.cc takes through
// the scalar code go through the arrays' too: each code, each number, each middle between two and
// its sides.
template <typename T>
void expect_conversions_right(const CpuLevel& level) {
  constexpr DType dtype = DTypeTraits<T>::dtype;
  const reference::Format format(name_of(dtype));
  std::vector<T> codes(1 << 16);
  std::vector<float> wide(codes.size());
  for (uint32_t i = 0; i < codes.size(); ++i) codes[i] = T::from_bits(i);
  const Operand operand{codes.data(), false};
  fold_with(*level.kernels, dtype, ReduceOp::kSum, &operand, 1, wide.data(), true, codes.size(), 1);
  for (uint32_t i = 0; i < codes.size(); ++i) {
    ASSERT_TRUE(reference::same(wide[i], static_cast<float>(format.decode(i)))) << "code " << i;
  }

  const std::vector<double>& numbers = reference::rounding_to<T>().magnitudes();
  std::vector<float> values = {HUGE_VALF, -HUGE_VALF, bit_cast<float>(0x7f800001u), 3.4e38f};
  for (size_t i = 0; i + 1 < numbers.size(); ++i) {
    const float middle = static_cast<float>((numbers[i] + numbers[i + 1]) / 2);
    for (const float value : {static_cast<float>(numbers[i]), middle, std::nextafter(middle, 0.0f),
                              std::nextafter(middle, HUGE_VALF)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  std::vector<T> rounded(values.size());
  const Operand source{values.data(), true};
  fold_with(*level.kernels, dtype, ReduceOp::kSum, &source, 1, rounded.data(), false, values.size(),
            1);
  for (size_t i = 0; i < values.size(); ++i) {
    const float expected = static_cast<float>(reference::rounding_to<T>()(values[i]));
    ASSERT_TRUE(reference::same(static_cast<float>(rounded[i]), expected)) << values[i];
  }
}

TEST(ReduceKernels, ConvertsAllSixteenBitFloats) {
  for (const CpuLevel& level : levels()) {
    SCOPED_TRACE(level.name);
    expect_conversions_right<Float16>(level);
    expect_conversions_right<BFloat16>(level);
  }
}

TEST(ReduceKernels, CpuLevelIsTheBestOne) {
  EXPECT_STREQ(cpu_level(), levels().front().name);
  EXPECT_STREQ(levels().back().name, "baseline");
}

#if defined(__x86_64__)
TEST(ReduceKernels, KeepsDenormalsOnThreadsThatFlushThem) {
  constexpr unsigned kFlush = 0x8040;
  const float denormal = 1e-40f;
  const Operand operands[] = {{&denormal, false}, {&denormal, false}};
  float sum = 0;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlush);
  fold(DType::kFloat32, ReduceOp::kSum, operands, 2, &sum, false, 1, 1);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  EXPECT_EQ(bit_cast<uint32_t>(sum), 2 * bit_cast<uint32_t>(denormal));
  EXPECT_EQ(after & kFlush, kFlush);
}
#endif

}  // namespace
}  // namespace jaxring
