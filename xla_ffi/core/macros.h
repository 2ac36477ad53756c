// Spellings that differ between a host compiler and nvcc, in one place.
#pragma once

// JR_HOST_DEVICE: callable on the host and in kernels.
// JR_DEVICE_INLINE and JR_INLINE are always inlined, also at -O0. This is a matter of correctness
// and not of speed: reduce_kernels_level.cc is compiled several times for different CPU levels, and
// an inline function left out of line would be merged by the linker, so that a baseline CPU could
// be handed the copy that holds AVX-512 instructions. tests/cpp checks that none is left.
// JR_NOINLINE: one copy, however many call it, where compiling several would take minutes.
// JR_SMALL: inline on the host; on a GPU, where 64-bit divisions are a hundred instructions, one
// copy.
#if defined(__CUDACC__)
#define JR_HOST_DEVICE __host__ __device__
#define JR_DEVICE __device__
#define JR_INLINE __forceinline__
#define JR_NOINLINE __noinline__
#define JR_SMALL inline __noinline__
#else
#define JR_HOST_DEVICE
#define JR_DEVICE
#define JR_INLINE inline __attribute__((always_inline))
#define JR_NOINLINE __attribute__((noinline))
#define JR_SMALL inline
#endif

// Promises that iterations of the next loop don't depend on each other. Operands that are the same
// array as the destination are fine under it; without it the compiler's overlap test sends exactly
// that (frequent) case to the scalar loop.
#if defined(__clang__)
#define JR_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__) && !defined(__CUDACC__)
#define JR_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define JR_INDEPENDENT_ITERATIONS
#endif

#if defined(__has_builtin)
#define JR_HAS_BUILTIN(name) __has_builtin(name)
#else
#define JR_HAS_BUILTIN(name) 0
#endif

// Bytes of a cache line: what two writers must keep apart. 64 on x86-64 and on the aarch64 servers
// that run Linux.
#define JR_CACHE_LINE 64
#define JR_CACHE_ALIGNED alignas(JR_CACHE_LINE)
