// 8- and 16-bit floats: storage only. Arithmetic happens in float; conversion to float is exact and
// conversion from float rounds to nearest, ties to even, once.
#pragma once

#include <cstdint>
#include <cstring>

#include "xla_ffi/core/macros.h"

namespace jaxring {

template <typename To, typename From>
JR_HOST_DEVICE JR_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of one size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// What the codes beyond the finite numbers mean (the suffixes are those of ml_dtypes).
enum class Special : uint8_t {
  kIeee,               // the highest exponent holds infinity and NaNs
  kNanAllOnes,         // "fn": no infinity; S.11…1 is NaN
  kNanIsNegativeZero,  // "fnuz": no infinity and no -0; 10…0 is NaN
};

// A float of 1 sign bit, `kExponentBits` and `kMantissaBits`. Values above the largest finite
// number become infinity where there is one and else NaN; nothing saturates (as in ml_dtypes). A
// NaN stays a NaN and is quiet. Branch-free expressions: the loops over it must vectorise.
template <typename BitsType, int kExponentBits, int kMantissaBits, int kBias, Special kSpecial>
struct SmallFloat {
  using Bits = BitsType;
  Bits bits;

  SmallFloat() = default;
  JR_HOST_DEVICE JR_INLINE explicit SmallFloat(float value) : bits(encode(value)) {}
  JR_HOST_DEVICE JR_INLINE explicit operator float() const { return decode(bits); }
  static JR_HOST_DEVICE JR_INLINE SmallFloat from_bits(Bits bits) {
    SmallFloat result;
    result.bits = bits;
    return result;
  }

 private:
  // Signed, as all values are below 2^31: SSE2 and AVX2 compare signed integers only.
  static constexpr int kShift = 23 - kMantissaBits;  // from our mantissa to a float's
  static constexpr int kSignShift = 31 - (kExponentBits + kMantissaBits);
  static constexpr int32_t kSign = 1 << (kExponentBits + kMantissaBits);
  static constexpr int32_t kMagnitude = kSign - 1;
  static constexpr int32_t kInfinity = kMagnitude & ~((1 << kMantissaBits) - 1);  // kIeee only
  static constexpr int32_t kLargest = kSpecial == Special::kIeee         ? kInfinity - 1
                                      : kSpecial == Special::kNanAllOnes ? kMagnitude - 1
                                                                         : kMagnitude;
  static constexpr int32_t kFloatInfinity = 0x7f800000;
  static constexpr int32_t kFloatQuiet = 1 << 22;
  static constexpr int32_t kFloatNan = kFloatInfinity | kFloatQuiet;
  static constexpr bool kHasFloatExponent = kExponentBits == 8 && kBias == 127;  // bfloat16

  static JR_HOST_DEVICE JR_INLINE float decode(Bits bits) {
    if constexpr (kHasFloatExponent) {
      return bit_cast<float>(uint32_t{bits} << kShift);
    } else {
      const int32_t magnitude = bits & kMagnitude;
      // Moves the exponent; exact, and turns denormals into normal numbers by itself.
      const float rescale = bit_cast<float>((127 + 127 - kBias) << 23);
      int32_t result = bit_cast<int32_t>(bit_cast<float>(magnitude << kShift) * rescale);
      if constexpr (kSpecial == Special::kIeee) {
        const int32_t quiet = magnitude > kInfinity ? kFloatNan : kFloatInfinity;
        result = magnitude >= kInfinity ? (magnitude << kShift) | quiet : result;
      } else if constexpr (kSpecial == Special::kNanAllOnes) {
        result = magnitude == kMagnitude ? kFloatNan : result;
      } else {
        result = bits == kSign ? kFloatNan : result;
      }
      const uint32_t sign = uint32_t{bits} << kSignShift & 0x80000000u;
      return bit_cast<float>(static_cast<uint32_t>(result) | sign);
    }
  }

  // Adds just under one half of the last place kept, or one half if that place is odd; a carry into
  // the exponent is right as it stands.
  template <typename Integer>
  static JR_HOST_DEVICE JR_INLINE Integer round_at_shift(Integer bits) {
    return bits + ((1 << (kShift - 1)) - 1) + ((bits >> kShift) & 1);
  }

  static JR_HOST_DEVICE JR_INLINE Bits encode(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffffu);
    if constexpr (kHasFloatExponent) {
      const uint32_t rounded = round_at_shift(bits);
      return static_cast<Bits>((magnitude > kFloatInfinity ? bits | kFloatQuiet : rounded) >>
                               kShift);
    } else {
      return encode_magnitude(magnitude, static_cast<int32_t>(bits >> kSignShift) & kSign);
    }
  }

  static JR_HOST_DEVICE JR_INLINE Bits encode_magnitude(int32_t magnitude, int32_t sign) {
    // Infinity and NaN, which would overflow below, are set right at the end.
    const int32_t finite = magnitude < kFloatInfinity ? magnitude : kFloatInfinity;
    int32_t result = (round_at_shift(finite) >> kShift) - ((127 - kBias) << kMantissaBits);
    // Below the smallest normal number: adding a number whose last place is our denormals' unit
    // makes the float adder do the rounding; the integer difference is the code.
    const int32_t smallest_normal = (127 - kBias + 1) << 23;
    const int32_t unit = (127 - kBias + 1 + kShift) << 23;
    const float shifted = bit_cast<float>(magnitude) + bit_cast<float>(unit);
    result = magnitude < smallest_normal ? bit_cast<int32_t>(shifted) - unit : result;
    if constexpr (kSpecial == Special::kIeee) {
      const int32_t nan = kInfinity | (kFloatQuiet | (magnitude & 0x007fffff)) >> kShift;
      result = result < kInfinity ? result : kInfinity;
      result = magnitude > kFloatInfinity ? nan : result;
    } else {
      const bool is_nan = magnitude >= kFloatInfinity || result > kLargest;
      if constexpr (kSpecial == Special::kNanAllOnes) {
        result = is_nan ? kMagnitude : result;
      } else {
        sign = result == 0 ? 0 : sign;
        sign = is_nan ? kSign : sign;
        result = is_nan ? 0 : result;
      }
    }
    return static_cast<Bits>(result | sign);
  }
};

using Float16 = SmallFloat<uint16_t, 5, 10, 15, Special::kIeee>;
using BFloat16 = SmallFloat<uint16_t, 8, 7, 127, Special::kIeee>;
using Float8E3M4 = SmallFloat<uint8_t, 3, 4, 3, Special::kIeee>;
using Float8E4M3 = SmallFloat<uint8_t, 4, 3, 7, Special::kIeee>;
using Float8E4M3Fn = SmallFloat<uint8_t, 4, 3, 7, Special::kNanAllOnes>;
using Float8E4M3Fnuz = SmallFloat<uint8_t, 4, 3, 8, Special::kNanIsNegativeZero>;
using Float8E4M3B11Fnuz = SmallFloat<uint8_t, 4, 3, 11, Special::kNanIsNegativeZero>;
using Float8E5M2 = SmallFloat<uint8_t, 5, 2, 15, Special::kIeee>;
using Float8E5M2Fnuz = SmallFloat<uint8_t, 5, 2, 16, Special::kNanIsNegativeZero>;

}  // namespace jaxring
