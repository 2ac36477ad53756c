// What numbers and reductions should be, computed one element at a time and by other means than the
// library's: small floats from the format that their name spells, integers in 128 bits, float in
// double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "xla_ffi/core/dtype.h"
#include "xla_ffi/core/reduce_op.h"

namespace jaxring::reference {

// A float format, read from its ml_dtypes name: float8_e4m3b11fnuz has 4 exponent bits, 3 mantissa
// bits, bias 11, no infinity ("fn"), no negative zero ("uz").
struct Format {
  int exponent_bits, mantissa_bits, bias;
  bool finite_only, unsigned_zero;

  explicit Format(std::string name) {
    if (name == "float16") name = "float16_e5m10";
    if (name == "bfloat16") name = "bfloat16_e8m7";
    size_t at = name.find("_e") + 2, used;
    const auto number = [&] {
      const int value = std::stoi(name.substr(at), &used);
      at += used + 1;
      return value;
    };
    exponent_bits = number();
    mantissa_bits = number();
    finite_only = name.find("fn") != std::string::npos;
    unsigned_zero = name.find("uz") != std::string::npos;
    bias = (1 << (exponent_bits - 1)) - (unsigned_zero ? 0 : 1);
    if (name[at - 1] == 'b') bias = number();
  }

  int bit_count() const { return 1 + exponent_bits + mantissa_bits; }

  double decode(uint32_t code) const {
    const uint32_t sign = code >> (exponent_bits + mantissa_bits);
    const uint32_t exponent = (code >> mantissa_bits) & ((1u << exponent_bits) - 1);
    const uint32_t mantissa = code & ((1u << mantissa_bits) - 1);
    const bool exponent_full = exponent == (1u << exponent_bits) - 1;
    const bool mantissa_full = mantissa == (1u << mantissa_bits) - 1;
    if (unsigned_zero) {
      if (sign && exponent == 0 && mantissa == 0) return std::nan("");
    } else if (finite_only) {
      if (exponent_full && mantissa_full) return std::nan("");
    } else if (exponent_full) {
      if (mantissa) return std::nan("");
      return sign ? -HUGE_VAL : HUGE_VAL;
    }
    const double significand = mantissa + (exponent ? 1 << mantissa_bits : 0);
    const int power = (exponent ? exponent : 1) - bias - mantissa_bits;
    return (sign ? -1 : 1) * std::ldexp(significand, power);
  }
};

// Rounds to the nearest number of a format, ties to the even code, by search among all of them.
class Rounding {
 public:
  explicit Rounding(const Format& format) : format_(format) {
    for (uint32_t code = 0; code < 1u << (format.bit_count() - 1); ++code) {
      const double value = format.decode(code);
      if (std::isfinite(value)) magnitudes_.push_back(value);  // ascending, and index == code
    }
    // The number that would come next, had the format room for it: what overflows is what would
    // round to it.
    const double step = magnitudes_.back() - magnitudes_[magnitudes_.size() - 2];
    overflow_ = magnitudes_.back() + step;
  }

  const std::vector<double>& magnitudes() const { return magnitudes_; }

  // The rounded value; NaN for numbers out of range of a format without infinity.
  double operator()(double value) const {
    if (std::isnan(value)) return value;
    const double magnitude = std::fabs(value);
    double result;
    if (magnitude >= overflow_) {
      result = HUGE_VAL;
    } else {
      const auto above = std::lower_bound(magnitudes_.begin(), magnitudes_.end(), magnitude);
      const size_t high = above - magnitudes_.begin();
      const double high_value = high == magnitudes_.size() ? overflow_ : *above;
      const size_t low = high_value == magnitude ? high : high - 1;
      const double to_low = magnitude - magnitudes_[std::min(low, magnitudes_.size() - 1)];
      const double to_high = high_value - magnitude;
      const bool up = to_high < to_low || (to_high == to_low && low % 2 == 1);
      result = low == high ? magnitude : !up ? magnitudes_[low] : high_value;
      if (result == overflow_) result = HUGE_VAL;
    }
    if (result == HUGE_VAL && format_.finite_only) return std::nan("");
    if (result == 0 && format_.unsigned_zero) return 0;
    return std::copysign(result, value);
  }

 private:
  Format format_;
  std::vector<double> magnitudes_;
  double overflow_;
};

template <typename T>
constexpr bool is_small_float_v = is_float_v<T> && !std::is_same_v<T, AccumulatorOf<T>>;

template <typename T>
const Rounding& rounding_to() {
  static const Rounding rounding{Format(name_of(DTypeTraits<T>::dtype))};
  return rounding;
}

template <typename A>
A extreme(bool is_min, A a, A b) {
  if constexpr (std::is_floating_point_v<A>) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<A>::quiet_NaN();
    if (a == b) return std::signbit(a) == is_min ? a : b;
  }
  return is_min ? std::min(a, b) : std::max(a, b);
}

// a op b, rounded to A. double holds any sum, product or quotient of two floats closely enough that
// rounding it to float is the one correct rounding; the machine's double arithmetic is taken as
// right.
template <typename A>
A combine(ReduceOp op, A a, A b) {
  const bool adds = op == ReduceOp::kSum || op == ReduceOp::kMean;
  if constexpr (is_complex_v<A>) {
    using Part = decltype(a.re);
    if (adds) return {combine(op, a.re, b.re), combine(op, a.im, b.im)};
    const auto product = [](Part x, Part y) { return combine(ReduceOp::kProd, x, y); };
    return {combine<Part>(ReduceOp::kSum, product(a.re, b.re), -product(a.im, b.im)),
            combine<Part>(ReduceOp::kSum, product(a.re, b.im), product(a.im, b.re))};
  } else {
    if (op == ReduceOp::kMin || op == ReduceOp::kMax) return extreme(op == ReduceOp::kMin, a, b);
    if (op == ReduceOp::kAnd) return a && b;
    if (op == ReduceOp::kOr) return a || b;
    using Wide = std::conditional_t<std::is_floating_point_v<A>, double, unsigned __int128>;
    return static_cast<A>(adds ? static_cast<Wide>(a) + static_cast<Wide>(b)
                               : static_cast<Wide>(a) * static_cast<Wide>(b));
  }
}

template <typename A>
A divided(A a, int64_t divisor) {
  if constexpr (is_complex_v<A>) {
    return {divided(a.re, divisor), divided(a.im, divisor)};
  } else {
    return static_cast<A>(static_cast<double>(a) / static_cast<double>(divisor));
  }
}

// Two elements that a reduction may give for each other: equal bits, or NaNs.
template <typename T>
bool same(const T& a, const T& b) {
  if constexpr (is_complex_v<T>) {
    return same(a.re, b.re) && same(a.im, b.im);
  } else {
    if constexpr (is_float_v<T>) {
      using A = AccumulatorOf<T>;
      if (std::isnan(static_cast<A>(a)) && std::isnan(static_cast<A>(b))) return true;
    }
    return std::memcmp(&a, &b, sizeof(T)) == 0;
  }
}

}  // namespace jaxring::reference
