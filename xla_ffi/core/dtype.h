// The element types, each one line of one list.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>

#include "xla_ffi/core/macros.h"
#include "xla_ffi/core/small_float.h"

namespace jaxring {

template <typename T>
struct Complex {
  T re, im;
};

// X(enumerator, name as numpy and ml_dtypes spell it, storage type, accumulator type)
//
// Partial results travel and add up in the accumulator type: float32 for 16- and 8-bit floats (a
// sum over ranks rounds once), the type itself otherwise (integers wrap around, as in XLA).
// Booleans stay booleans: Python makes their sums int32 before they come here.
#define JR_FOR_EACH_DTYPE(X)                                            \
  X(kBool, "bool", bool, bool)                                          \
  X(kInt8, "int8", int8_t, int8_t)                                      \
  X(kInt16, "int16", int16_t, int16_t)                                  \
  X(kInt32, "int32", int32_t, int32_t)                                  \
  X(kInt64, "int64", int64_t, int64_t)                                  \
  X(kUInt8, "uint8", uint8_t, uint8_t)                                  \
  X(kUInt16, "uint16", uint16_t, uint16_t)                              \
  X(kUInt32, "uint32", uint32_t, uint32_t)                              \
  X(kUInt64, "uint64", uint64_t, uint64_t)                              \
  X(kFloat16, "float16", Float16, float)                                \
  X(kBFloat16, "bfloat16", BFloat16, float)                             \
  X(kFloat32, "float32", float, float)                                  \
  X(kFloat64, "float64", double, double)                                \
  X(kComplex64, "complex64", Complex<float>, Complex<float>)            \
  X(kComplex128, "complex128", Complex<double>, Complex<double>)        \
  X(kFloat8E3M4, "float8_e3m4", Float8E3M4, float)                      \
  X(kFloat8E4M3, "float8_e4m3", Float8E4M3, float)                      \
  X(kFloat8E4M3Fn, "float8_e4m3fn", Float8E4M3Fn, float)                \
  X(kFloat8E4M3Fnuz, "float8_e4m3fnuz", Float8E4M3Fnuz, float)          \
  X(kFloat8E4M3B11Fnuz, "float8_e4m3b11fnuz", Float8E4M3B11Fnuz, float) \
  X(kFloat8E5M2, "float8_e5m2", Float8E5M2, float)                      \
  X(kFloat8E5M2Fnuz, "float8_e5m2fnuz", Float8E5M2Fnuz, float)

enum class DType : uint8_t {
#define JR_X(enumerator, name, storage, accumulator) enumerator,
  JR_FOR_EACH_DTYPE(JR_X)
#undef JR_X
};

#define JR_X(enumerator, name, storage, accumulator) +1
inline constexpr int kDTypeCount = 0 JR_FOR_EACH_DTYPE(JR_X);
#undef JR_X

// Storage type -> everything known about it at compile time.
template <typename Storage>
struct DTypeTraits;
#define JR_X(enumerator, name_, storage, accumulator) \
  template <>                                         \
  struct DTypeTraits<storage> {                       \
    using Accumulator = accumulator;                  \
    static constexpr DType dtype = DType::enumerator; \
  };
JR_FOR_EACH_DTYPE(JR_X)
#undef JR_X

template <typename Storage>
using AccumulatorOf = typename DTypeTraits<Storage>::Accumulator;

template <typename T>
inline constexpr bool is_complex_v =
    std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>;

// Real floating point, stored in any width.
template <typename T>
inline constexpr bool is_float_v = std::is_floating_point_v<AccumulatorOf<T>>;

// Calls f(Storage{}) with a value of dtype's storage type: the bridge from run time to templates.
template <typename F>
constexpr decltype(auto) visit_dtype(DType dtype, F&& f) {
  switch (dtype) {
#define JR_X(enumerator, name, storage, accumulator) \
  case DType::enumerator:                            \
    return f(storage{});
    JR_FOR_EACH_DTYPE(JR_X)
#undef JR_X
  }
  __builtin_unreachable();
}

// Bytes of one element.
JR_HOST_DEVICE constexpr size_t size_of(DType dtype) {
  switch (dtype) {
#define JR_X(enumerator, name, storage, accumulator) \
  case DType::enumerator:                            \
    return sizeof(storage);
    JR_FOR_EACH_DTYPE(JR_X)
#undef JR_X
  }
  return 0;
}

// Bytes of one element of a partial result.
JR_HOST_DEVICE constexpr size_t accumulator_size_of(DType dtype) {
  switch (dtype) {
#define JR_X(enumerator, name, storage, accumulator) \
  case DType::enumerator:                            \
    return sizeof(accumulator);
    JR_FOR_EACH_DTYPE(JR_X)
#undef JR_X
  }
  return 0;
}

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
#define JR_X(enumerator, name, storage, accumulator) \
  case DType::enumerator:                            \
    return name;
    JR_FOR_EACH_DTYPE(JR_X)
#undef JR_X
  }
  return "unknown dtype";
}

// The dtype that numpy or ml_dtypes calls `name`; nothing if there is none.
constexpr std::optional<DType> dtype_from_name(std::string_view name) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (name == name_of(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace jaxring
