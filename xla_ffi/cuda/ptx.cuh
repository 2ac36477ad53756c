// The device's side of a block: every PTX instruction we rely on, by name and with the ordering it
// gives. The terms are those of the PTX memory consistency model (PTX ISA, chapter 8).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "xla_ffi/cuda/pack.h"

namespace jaxring::cuda {

// What the kernels need of a thread block. tests/cpp/block_shim.h has the same members over host
// threads.
struct CudaBlock {
  int index;  // among the blocks of its rank

  __device__ int thread() const { return threadIdx.x; }
  __device__ int thread_count() const { return blockDim.x; }

  // bar.sync: everything that the block's threads wrote before is visible to all of them after.
  __device__ void barrier() { __syncthreads(); }
  // A barrier that tells all threads whether any of them said yes: what they then do together must
  // not depend on one thread's luck.
  __device__ bool any(bool yes) { return __syncthreads_or(yes) != 0; }

  // acquire: what the writer did before its release is visible after this load. sys: the writer may
  // be another GPU or the host. After a barrier() it holds for the whole block, as causality order
  // is transitive; so one thread may wait for all.
  __device__ uint64_t load_acquire(const uint64_t* address) const {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
  }
  // release: for the same reason it also covers what the block's other threads did before a
  // barrier(), reads included, so that one thread may publish for all. One instruction, and not a
  // fence and a relaxed store: it says which store publishes, and the emulation's sanitizer knows
  // it.
  __device__ void store_release(uint64_t* address, uint64_t value) const {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
  }
  // Writes `value` where there is 0. relaxed: the word says all there is to say. Atomic among this
  // GPU's blocks; the host, to whose memory it may go, only reads.
  __device__ void store_first(uint64_t* address, uint64_t value) const {
    [[maybe_unused]] uint64_t before;
    asm volatile("atom.relaxed.sys.global.cas.b64 %0, [%1], 0, %2;"
                 : "=l"(before)
                 : "l"(address), "l"(value)
                 : "memory");
  }

  // Two packets in one 16-byte store. relaxed: each 8-byte packet is written and seen whole, data
  // and flag together, so that nothing has to be ordered with it; vector elements may become
  // visible one before the other, which is why each has a flag.
  __device__ void store_packets(Packets* address, Packets value) const {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};"
                 :
                 : "l"(address), "l"(value.low), "l"(value.high)
                 : "memory");
  }
  __device__ Packets load_packets(const Packets* address) const {
    Packets value;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(value.low), "=l"(value.high)
                 : "l"(address)
                 : "memory");
    return value;
  }

  // Plain (weak) 16-byte accesses: ordered by the flags around them. Never .nc, whose cache would
  // not see what a peer has written since the kernel began.
  __device__ Pack load16(const void* address) const {
    Pack pack;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]),
                   "=r"(pack.words[3])
                 : "l"(address)
                 : "memory");
    return pack;
  }
  __device__ void store16(void* address, Pack pack) const {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(address), "r"(pack.words[0]), "r"(pack.words[1]), "r"(pack.words[2]),
                   "r"(pack.words[3])
                 : "memory");
  }

  // Instructions on a multicast address, which stands for the same offset in every rank's window
  // (sm_90 and newer, over NVSwitch). relaxed: as the plain accesses, ordered by the flags around
  // them. They go by an address of their own, so that a proxy fence is needed too.

  // The sum over all ranks of a pack of float, Float16 or BFloat16; those are summed in float32 and
  // rounded once.
  template <typename T>
  __device__ Pack load_sum16([[maybe_unused]] const void* multicast) const {
    Pack pack{};
#if __CUDA_ARCH__ >= 900
    if constexpr (std::is_same_v<T, float>) {
      float sums[4];
      asm volatile("multimem.ld_reduce.relaxed.sys.global.add.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(sums[0]), "=f"(sums[1]), "=f"(sums[2]), "=f"(sums[3])
                   : "l"(multicast)
                   : "memory");
      memcpy(&pack, sums, sizeof(pack));
    } else if constexpr (std::is_same_v<T, BFloat16>) {
      asm volatile(
          "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {%0, %1, %2, %3}, [%4];"
          : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3])
          : "l"(multicast)
          : "memory");
    } else {
      static_assert(std::is_same_v<T, Float16>);
      asm volatile(
          "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.f16x2 {%0, %1, %2, %3}, [%4];"
          : "=r"(pack.words[0]), "=r"(pack.words[1]), "=r"(pack.words[2]), "=r"(pack.words[3])
          : "l"(multicast)
          : "memory");
    }
#else
    __trap();  // set-up has seen to it that no older GPU comes here
#endif
    return pack;
  }
  // The pack to every rank's window; its type is only bits.
  __device__ void store_all16([[maybe_unused]] void* multicast, [[maybe_unused]] Pack pack) const {
#if __CUDA_ARCH__ >= 900
    asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(multicast), "f"(__uint_as_float(pack.words[0])),
                   "f"(__uint_as_float(pack.words[1])), "f"(__uint_as_float(pack.words[2])),
                   "f"(__uint_as_float(pack.words[3]))
                 : "memory");
#endif
  }
  // Orders accesses to the same memory by several addresses: the causality that flags and barriers
  // give holds across a window's two addresses only with such a fence on its way.
  __device__ void proxy_fence() const { asm volatile("fence.proxy.alias;" ::: "memory"); }

  // One clock for the whole GPU, in ns; its steps are up to a microsecond apart.
  __device__ uint64_t now_ns() const {
    uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
  }

  // Lets go of the memory system between two polls; at most twice as long as it says.
  __device__ void pause() const { __nanosleep(20); }
};

}  // namespace jaxring::cuda
