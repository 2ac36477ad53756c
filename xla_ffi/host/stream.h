// Writing past the caches: a large result is not read again soon, and a line that is written as a
// whole need not be fetched first. Twice as fast from some MiB on (docs/performance.md).
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace jaxring {

// Whether outputs of so many bytes, of a process together, are streamed: what the last cache would
// hold had better stay there, the less so of several devices' sums and exchanges. Measured with a
// cache of 32 MiB, and with one of 480: unstreamed 2 sums of 16 MiB took 1.0 ms instead of 1.9 and
// an all-gather of 16 MiB on 4 devices 2.2 instead of 2.7, but 8 sums of 8 MiB 6.4 instead of 5.0
// and a permutation of 16 MiB on 4 devices 4.2 instead of 3.5.
inline bool is_streamed(int64_t bytes, bool of_many) {
  constexpr int64_t kLeastBytes = 8 << 20;
#ifdef _SC_LEVEL3_CACHE_SIZE
  static const int64_t last_cache_bytes = sysconf(_SC_LEVEL3_CACHE_SIZE);  // 0 or -1: unknown
#else
  constexpr int64_t last_cache_bytes = 0;
#endif
  return bytes >= std::max(kLeastBytes, last_cache_bytes / (of_many ? 8 : 4));
}

// memcpy. Whoever hands the copy to another thread calls stream_fence() first.
inline void stream_copy(void* dst, const void* src, int64_t bytes) {
#if defined(__x86_64__)
  constexpr int64_t kLine = 64;
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const int64_t to_line = -reinterpret_cast<intptr_t>(to) & (kLine - 1);
  const int64_t head = to_line < bytes ? to_line : bytes;
  std::memcpy(to, from, head);
  int64_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const __m128i* source = reinterpret_cast<const __m128i*>(from + done);
    __m128i* target = reinterpret_cast<__m128i*>(to + done);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
  std::memcpy(to + done, from + done, bytes - done);
#else
  std::memcpy(dst, src, bytes);
#endif
}

inline void stream_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

inline void copy_bytes(void* dst, const void* src, int64_t bytes, bool streamed) {
  if (streamed) {
    stream_copy(dst, src, bytes);
  } else {
    std::memcpy(dst, src, bytes);
  }
}

}  // namespace jaxring
