// Copies and fills by all threads of a block, 16 bytes at a time where alignment allows.
#pragma once

#include <cstdint>
#include <cstring>

#include "xla_ffi/cuda/pack.h"

namespace jaxring::cuda {

// Loads that a thread has in flight: 4 x 16 bytes x 512 threads are what a link's latency holds.
constexpr int kInFlight = 4;

template <typename Unit, class Block>
JR_DEVICE JR_INLINE Unit load_unit(Block& block, const char* address) {
  if constexpr (sizeof(Unit) == kPackBytes) {
    return block.load16(address);
  } else {
    Unit unit;
    memcpy(&unit, __builtin_assume_aligned(address, sizeof(Unit)), sizeof(Unit));
    return unit;
  }
}

template <typename Unit, class Block>
JR_DEVICE JR_INLINE void store_unit(Block& block, char* address, Unit unit) {
  if constexpr (sizeof(Unit) == kPackBytes) {
    block.store16(address, unit);
  } else {
    memcpy(__builtin_assume_aligned(address, sizeof(Unit)), &unit, sizeof(Unit));
  }
}

// The units of a copy from one place to one or several: units `thread`, `thread` + thread_count, …
template <typename Unit, class Block>
JR_DEVICE JR_INLINE void move_units(Block& block, const char* from, char* const* to, int to_count,
                                    int64_t begin, int64_t units) {
  const int64_t stride = block.thread_count();
  const auto at = [&](int64_t unit) { return begin + unit * static_cast<int64_t>(sizeof(Unit)); };
  int64_t i = block.thread();
  for (; i + (kInFlight - 1) * stride < units; i += kInFlight * stride) {
    Unit values[kInFlight];
    JR_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      values[k] = load_unit<Unit>(block, from + at(i + k * stride));
    }
    for (int d = 0; d < to_count; ++d) {
      JR_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        store_unit<Unit>(block, to[d] + at(i + k * stride), values[k]);
      }
    }
  }
  for (; i < units; i += stride) {
    const Unit value = load_unit<Unit>(block, from + at(i));
    for (int d = 0; d < to_count; ++d) store_unit<Unit>(block, to[d] + at(i), value);
  }
}

// What lies before the first aligned unit and after the last goes byte by byte.
template <typename Unit, class Block>
JR_DEVICE JR_INLINE void move_aligned(Block& block, const char* from, char* const* to, int to_count,
                                      int64_t bytes) {
  constexpr int64_t kUnit = sizeof(Unit);
  const int64_t before = -reinterpret_cast<intptr_t>(from) & (kUnit - 1);
  const int64_t head = before < bytes ? before : bytes;
  const int64_t units = (bytes - head) / kUnit;
  const int64_t tail = head + units * kUnit;
  move_units<Unit>(block, from, to, to_count, head, units);
  move_units<uint8_t>(block, from, to, to_count, 0, head);
  move_units<uint8_t>(block, from, to, to_count, tail, bytes - tail);
}

// Copies `bytes` to each of `to`, in the widest units in which all addresses are aligned alike.
// Every thread of the block calls it; it has no barrier.
template <class Block>
JR_DEVICE JR_NOINLINE void move(Block& block, const char* from, char* const* to, int to_count,
                                int64_t bytes) {
  uintptr_t differences = 0;
  for (int d = 0; d < to_count; ++d) {
    differences |= reinterpret_cast<uintptr_t>(from) ^ reinterpret_cast<uintptr_t>(to[d]);
  }
  if (differences % kPackBytes == 0) return move_aligned<Pack>(block, from, to, to_count, bytes);
  if (differences % 4 == 0) return move_aligned<uint32_t>(block, from, to, to_count, bytes);
  if (differences % 2 == 0) return move_aligned<uint16_t>(block, from, to, to_count, bytes);
  move_units<uint8_t>(block, from, to, to_count, 0, bytes);
}

template <class Block>
JR_DEVICE void move(Block& block, const char* from, char* to, int64_t bytes) {
  if (from != to) move(block, from, &to, 1, bytes);
}

// Sets `bytes` at `to` to the byte `value`.
template <class Block>
JR_DEVICE JR_NOINLINE void fill(Block& block, char* to, int value, int64_t bytes) {
  const uint32_t word = static_cast<uint32_t>(value) * 0x01010101u;
  const Pack pack{{word, word, word, word}};
  const int64_t before = -reinterpret_cast<intptr_t>(to) & (kPackBytes - 1);
  const int64_t head = before < bytes ? before : bytes;
  const int64_t units = (bytes - head) / kPackBytes;
  for (int64_t i = block.thread(); i < units; i += block.thread_count()) {
    block.store16(to + head + i * kPackBytes, pack);
  }
  const int64_t tail = head + units * kPackBytes;
  for (int64_t i = block.thread(); i < head; i += block.thread_count()) {
    to[i] = static_cast<char>(value);
  }
  for (int64_t i = tail + block.thread(); i < bytes; i += block.thread_count()) {
    to[i] = static_cast<char>(value);
  }
}

}  // namespace jaxring::cuda
