// The loops of fold(), for one CPU level: reduce_kernels.cmake compiles this file once per level
// with that level's flags and JR_CPU_LEVEL = the level's identifier.
//
// Everything here has internal linkage or is always inlined (see macros.h); no standard library.

#include <cstdint>
#include <type_traits>

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#endif

#include "xla_ffi/host/reduce_kernels_table.h"

namespace jaxring {
namespace {

template <typename Functor, typename A>
void combine(const void* left_data, const void* right_data, void* dst_data, int64_t count) {
  const A* left = static_cast<const A*>(left_data);
  const A* right = static_cast<const A*>(right_data);
  A* dst = static_cast<A*>(dst_data);
  JR_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) dst[i] = Functor()(left[i], right[i]);
}

// Eight floats from and to a float or 16-bit array, where plain loops fall short: GCC 12 vectorises
// neither _Float16 nor loops over the CPU's scalar conversion, and blends bfloat16's NaNs in 16
// bits at half the speed.
#if defined(__AVX2__) && defined(__F16C__)
#define JR_HAS_EIGHT 1
using Eight = __m256;
JR_INLINE __m128i load_eight_bits(const void* src) {
  return _mm_loadu_si128(static_cast<const __m128i*>(src));
}
JR_INLINE void store_eight_bits(__m128i value, void* dst) {
  _mm_storeu_si128(static_cast<__m128i*>(dst), value);
}
JR_INLINE Eight load_eight(const float* src) { return _mm256_loadu_ps(src); }
JR_INLINE Eight load_eight(const Float16* src) { return _mm256_cvtph_ps(load_eight_bits(src)); }
JR_INLINE Eight load_eight(const BFloat16* src) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_eight_bits(src)), 16));
}
JR_INLINE void store_eight(Eight value, float* dst) { _mm256_storeu_ps(dst, value); }
JR_INLINE void store_eight(Eight value, Float16* dst) {
  store_eight_bits(_mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT), dst);
}
JR_INLINE void store_eight(Eight value, BFloat16* dst) {  // as SmallFloat::encode
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i is_odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(is_odd, _mm256_set1_epi32(0x7fff));
  const Eight rounded = _mm256_castsi256_ps(_mm256_add_epi32(bits, bias));
  const Eight quiet = _mm256_castsi256_ps(_mm256_or_si256(bits, _mm256_set1_epi32(1 << 22)));
  const Eight is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
  const __m256i high =
      _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(rounded, quiet, is_nan)), 16);
  store_eight_bits(
      _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)), dst);
}
template <typename T>
constexpr bool kIsEight =
    std::is_same_v<T, float> || std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
#endif

// Converts between a dtype and its accumulator type, either way.
template <typename From, typename To>
void convert(const void* src_data, void* dst_data, int64_t count) {
  const From* src = static_cast<const From*>(src_data);
  To* dst = static_cast<To*>(dst_data);
  int64_t i = 0;
#if defined(JR_HAS_EIGHT)
  if constexpr (kIsEight<From> && kIsEight<To>) {
    for (; i + 16 <= count; i += 16) {
      const Eight first = load_eight(src + i), second = load_eight(src + i + 8);
      store_eight(first, dst + i);
      store_eight(second, dst + i + 8);
    }
  }
#endif
  JR_INDEPENDENT_ITERATIONS
  for (; i < count; ++i) dst[i] = static_cast<To>(src[i]);
}

template <typename Left, typename Right, typename To>
void mixed_sum(const void* left_data, const void* right_data, void* dst_data, int64_t count) {
  const Left* left = static_cast<const Left*>(left_data);
  const Right* right = static_cast<const Right*>(right_data);
  To* dst = static_cast<To*>(dst_data);
  int64_t i = 0;
#if defined(JR_HAS_EIGHT)
  if constexpr (kIsEight<Left> && kIsEight<Right> && kIsEight<To>) {
    for (; i + 8 <= count; i += 8) {
      store_eight(_mm256_add_ps(load_eight(left + i), load_eight(right + i)), dst + i);
    }
  }
#endif
  JR_INDEPENDENT_ITERATIONS
  for (; i < count; ++i) {
    dst[i] = static_cast<To>(static_cast<float>(left[i]) + static_cast<float>(right[i]));
  }
}

template <typename A>
void divide_all(const void* src_data, void* dst_data, int64_t count, int64_t divisor) {
  const A* src = static_cast<const A*>(src_data);
  A* dst = static_cast<A*>(dst_data);
  JR_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < count; ++i) dst[i] = divide(src[i], divisor);
}

// The functor and type whose loop serves Functor on A, so that equal machine code exists once: a
// mean adds like a sum, and wrapping sums and products of signed integers are those of unsigned
// ones.
template <typename Functor>
using LoopFunctor = std::conditional_t<std::is_same_v<Functor, Mean>, Sum, Functor>;

template <typename Functor, typename A>
constexpr bool kIgnoresSign = std::is_integral_v<A> && !std::is_same_v<A, bool> &&
                              (std::is_same_v<Functor, Sum> || std::is_same_v<Functor, Prod>);

template <typename A, bool kUnsigned>
struct LoopTypeOf {
  using type = A;
};
template <typename A>
struct LoopTypeOf<A, true> {
  using type = std::make_unsigned_t<A>;
};

template <typename Functor, typename T>
constexpr KernelTable::Combine combine_kernel() {
  using A = AccumulatorOf<T>;
  if constexpr (Functor::template supports<T>) {
    using F = LoopFunctor<Functor>;
    return combine<F, typename LoopTypeOf<A, kIgnoresSign<F, A>>::type>;
  } else {
    return nullptr;
  }
}

template <typename T>
constexpr void add_dtype(KernelTable& table) {
  constexpr int dtype = static_cast<int>(DTypeTraits<T>::dtype);
#define JR_X(enumerator, name, functor) \
  table.combine[static_cast<int>(ReduceOp::enumerator)][dtype] = combine_kernel<functor, T>();
  JR_FOR_EACH_REDUCE_OP(JR_X)
#undef JR_X
  using A = AccumulatorOf<T>;
  if constexpr (!std::is_same_v<T, A>) {
    table.widen[dtype] = convert<T, A>;
    table.narrow[dtype] = convert<A, T>;
  }
  if constexpr (!std::is_same_v<T, A> && sizeof(T) == 2) {  // 8-bit floats: not worth their size
    auto& sums = table.mixed_sum[dtype];
    sums[0][0][0] = mixed_sum<T, T, T>;
    sums[0][0][1] = mixed_sum<T, T, A>;
    sums[0][1][0] = mixed_sum<T, A, T>;
    sums[0][1][1] = mixed_sum<T, A, A>;
    sums[1][0][0] = mixed_sum<A, T, T>;
    sums[1][0][1] = mixed_sum<A, T, A>;
    sums[1][1][0] = mixed_sum<A, A, T>;
  }
  if constexpr (Mean::supports<T>) table.divide[dtype] = divide_all<A>;
}

constexpr KernelTable make_table() {
  KernelTable table{};
#define JR_X(enumerator, name, storage, accumulator) add_dtype<storage>(table);
  JR_FOR_EACH_DTYPE(JR_X)
#undef JR_X
  return table;
}

}  // namespace

namespace JR_CPU_LEVEL {
extern const KernelTable kernel_table;
constexpr KernelTable kernel_table = make_table();
}  // namespace JR_CPU_LEVEL

}  // namespace jaxring
