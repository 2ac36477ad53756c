// 16 bytes, the most that one thread loads or stores at once, as the elements that they hold.
#pragma once

#include <cstdint>
#include <cstring>

#include "xla_ffi/core/dtype.h"

#if defined(__CUDACC__)
#define JR_UNROLL _Pragma("unroll")
#define JR_NO_UNROLL _Pragma("unroll 1")
#else
#define JR_UNROLL
#define JR_NO_UNROLL
#endif

namespace jaxring::cuda {

struct alignas(16) Pack {
  uint32_t words[4];
};

// Two packets; each is 4 bytes of data (low half) and their flag.
struct alignas(16) Packets {
  uint64_t low;
  uint64_t high;
};

constexpr int kPackBytes = sizeof(Pack);

// Elements of a pack. A message is cut in groups of so many, whose parts are then aligned.
template <typename T>
inline constexpr int kLanes = kPackBytes / static_cast<int>(sizeof(T));

template <typename T>
JR_DEVICE JR_INLINE void unpack(const Pack& pack, AccumulatorOf<T>* values) {
  T elements[kLanes<T>];
  memcpy(elements, &pack, sizeof(pack));
  JR_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) values[i] = static_cast<AccumulatorOf<T>>(elements[i]);
}

template <typename T>
JR_DEVICE JR_INLINE Pack packed(const AccumulatorOf<T>* values) {
  T elements[kLanes<T>];
  JR_UNROLL
  for (int i = 0; i < kLanes<T>; ++i) elements[i] = static_cast<T>(values[i]);
  Pack pack;
  memcpy(&pack, elements, sizeof(pack));
  return pack;
}

JR_DEVICE JR_INLINE Packets packets_of(uint32_t a, uint32_t b, uint32_t flag) {
  return Packets{uint64_t{flag} << 32 | a, uint64_t{flag} << 32 | b};
}
JR_DEVICE JR_INLINE bool carry(Packets packets, uint32_t flag) {
  return static_cast<uint32_t>(packets.low >> 32) == flag &&
         static_cast<uint32_t>(packets.high >> 32) == flag;
}
JR_DEVICE JR_INLINE Pack payload_of(Packets first, Packets second) {
  return Pack{{static_cast<uint32_t>(first.low), static_cast<uint32_t>(first.high),
               static_cast<uint32_t>(second.low), static_cast<uint32_t>(second.high)}};
}

// Whether an access of so many bytes may go to `address`.
JR_DEVICE JR_INLINE bool is_aligned(const void* address, int bytes) {
  return (reinterpret_cast<uintptr_t>(address) & (bytes - 1)) == 0;
}

}  // namespace jaxring::cuda
