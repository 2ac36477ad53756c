// The reduction operations, each one line of one list and one functor.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "xla_ffi/core/dtype.h"
#include "xla_ffi/core/macros.h"

namespace jaxring {

// X(enumerator, name, functor)
#define JR_FOR_EACH_REDUCE_OP(X) \
  X(kSum, "sum", Sum)            \
  X(kMean, "mean", Mean)         \
  X(kProd, "prod", Prod)         \
  X(kMin, "min", Min)            \
  X(kMax, "max", Max)            \
  X(kAnd, "and", And)            \
  X(kOr, "or", Or)

enum class ReduceOp : uint8_t {
#define JR_X(enumerator, name, functor) enumerator,
  JR_FOR_EACH_REDUCE_OP(JR_X)
#undef JR_X
};

#define JR_X(enumerator, name, functor) +1
inline constexpr int kReduceOpCount = 0 JR_FOR_EACH_REDUCE_OP(JR_X);
#undef JR_X

// Integer arithmetic is done unsigned and at least 32 bits wide: it wraps around without undefined
// behaviour (uint16_t products would overflow an int).
template <typename T>
using WrappingOf = std::conditional_t<(sizeof(T) > 4), uint64_t, uint32_t>;

// a * b, rounded: never fused with an addition that follows, so that hosts and devices with and
// without fused multiply-add agree. -ffp-contract=off is not enough: GCC 12 vectorises the complex
// product with vfmaddsub nevertheless.
template <typename T>
JR_HOST_DEVICE JR_INLINE T product(T a, T b) {
#if defined(__CUDA_ARCH__)
  if constexpr (sizeof(T) == 4) {
    return __fmul_rn(a, b);
  } else {
    return __dmul_rn(a, b);
  }
#elif JR_HAS_BUILTIN(__builtin_assoc_barrier)
  return __builtin_assoc_barrier(a * b);
#else
  return a * b;
#endif
}

// A functor combines two accumulators; `supports<T>` says for which storage types it has a meaning.

struct Sum {
  template <typename T>
  static constexpr bool supports = !std::is_same_v<T, bool>;
  template <typename T>
  JR_HOST_DEVICE JR_INLINE T operator()(T a, T b) const {
    if constexpr (is_complex_v<T>) {
      return {a.re + b.re, a.im + b.im};
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(WrappingOf<T>(a) + WrappingOf<T>(b));
    } else {
      return a + b;
    }
  }
};

// A sum that `finish` divides at the end.
struct Mean : Sum {
  template <typename T>
  static constexpr bool supports = is_float_v<T> || is_complex_v<T>;
};

struct Prod {
  template <typename T>
  static constexpr bool supports = !std::is_same_v<T, bool>;
  template <typename T>
  JR_HOST_DEVICE JR_INLINE T operator()(T a, T b) const {
    if constexpr (is_complex_v<T>) {
      return {product(a.re, b.re) - product(a.im, b.im), product(a.re, b.im) + product(a.im, b.re)};
    } else if constexpr (std::is_integral_v<T>) {
      return static_cast<T>(WrappingOf<T>(a) * WrappingOf<T>(b));
    } else {
      return a * b;
    }
  }
};

// NaN in any operand gives NaN, and -0 counts as less than +0, so that the order of the operands
// doesn't show (IEEE 754-2019 minimum and maximum; std::min and fmin do neither).
template <bool kIsMin>
struct Extreme {
  template <typename T>
  static constexpr bool supports = !is_complex_v<T>;
  template <typename T>
  JR_HOST_DEVICE JR_INLINE T operator()(T a, T b) const {
    T result = (kIsMin ? a < b : b < a) ? a : b;  // b also if either is NaN
    if constexpr (std::is_floating_point_v<T>) {
      using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
      const Bits bits_a = bit_cast<Bits>(a), bits_b = bit_cast<Bits>(b);
      // Equal numbers differ in bits only as zeros of two signs.
      const T equal = bit_cast<T>(kIsMin ? bits_a | bits_b : bits_a & bits_b);
      result = a == b ? equal : result;
      result = a != a ? a : result;
    }
    return result;
  }
};
struct Min : Extreme<true> {};
struct Max : Extreme<false> {};

struct And {
  template <typename T>
  static constexpr bool supports = std::is_same_v<T, bool>;
  template <typename T>
  JR_HOST_DEVICE JR_INLINE T operator()(T a, T b) const {
    return static_cast<T>(a & b);
  }
};

struct Or {
  template <typename T>
  static constexpr bool supports = std::is_same_v<T, bool>;
  template <typename T>
  JR_HOST_DEVICE JR_INLINE T operator()(T a, T b) const {
    return static_cast<T>(a | b);
  }
};

// The last step of a mean, in the accumulator and before the one rounding: a division and not a
// product with 1 / divisor, which would round twice.
template <typename Accumulator>
JR_HOST_DEVICE JR_INLINE Accumulator divide(Accumulator value, int64_t divisor) {
  if constexpr (is_complex_v<Accumulator>) {
    using Part = decltype(value.re);
    return {value.re / static_cast<Part>(divisor), value.im / static_cast<Part>(divisor)};
  } else {
    return static_cast<Accumulator>(value / static_cast<Accumulator>(divisor));
  }
}

constexpr const char* name_of(ReduceOp op) {
  switch (op) {
#define JR_X(enumerator, name, functor) \
  case ReduceOp::enumerator:            \
    return name;
    JR_FOR_EACH_REDUCE_OP(JR_X)
#undef JR_X
  }
  return "unknown op";
}

constexpr std::optional<ReduceOp> reduce_op_from_name(std::string_view name) {
  for (int i = 0; i < kReduceOpCount; ++i) {
    if (name == name_of(static_cast<ReduceOp>(i))) return static_cast<ReduceOp>(i);
  }
  return std::nullopt;
}

// Calls f(functor) with op's functor.
template <typename F>
constexpr decltype(auto) visit_reduce_op(ReduceOp op, F&& f) {
  switch (op) {
#define JR_X(enumerator, name, functor) \
  case ReduceOp::enumerator:            \
    return f(functor{});
    JR_FOR_EACH_REDUCE_OP(JR_X)
#undef JR_X
  }
  __builtin_unreachable();
}

// Whether op has a meaning for dtype.
constexpr bool supports(ReduceOp op, DType dtype) {
  return visit_reduce_op(op, [&](auto functor) {
    return visit_dtype(dtype, [](auto storage) {
      return decltype(functor)::template supports<decltype(storage)>;
    });
  });
}

}  // namespace jaxring
