// The device's side of a block: every PTX instruction we rely on, by name and with the ordering it
// gives.
#pragma once

#include <cstdint>

namespace jaxring {

// What BlockPrims needs of a thread block. tests/cpp/block_shim.h has the same members over host
// threads.
struct CudaBlock {
  __device__ int thread() const { return threadIdx.x; }
  __device__ int thread_count() const { return blockDim.x; }

  // Everything that the block's threads wrote before is visible to all of them after.
  __device__ void barrier() { __syncthreads(); }

  // acquire: what the writer did before its release is visible after this load. sys: the writer may
  // be another GPU or the host. A release after a barrier() also covers the other threads' writes
  // before that barrier (causality order is transitive), so one thread may publish for the block.
  __device__ uint64_t load_acquire(const uint64_t* address) const {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
    return value;
  }
  __device__ void store_release(uint64_t* address, uint64_t value) const {
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(address), "l"(value) : "memory");
  }

  // One clock for the whole GPU, in ns; its steps are up to a microsecond apart.
  __device__ uint64_t now_ns() const {
    uint64_t value;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
    return value;
  }

  // Lets go of the memory system between two polls.
  __device__ void pause() const { __nanosleep(20); }
};

}  // namespace jaxring
