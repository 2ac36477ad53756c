// The kernel. Each kernels_*.cu makes one for some dtypes, so that they compile side by side; a
// dtype costs two functions.
#pragma once

#include "xla_ffi/cuda/ptx.cuh"
#include "xla_ffi/cuda/run_call.cuh"

namespace jaxring::cuda {

// `mine` is the rank's call. Where many ranks share a GPU `all` is theirs, in memory that the
// device can read, and blocks are dealt out rank by rank.
template <class Types>
__global__ void __launch_bounds__(kThreads, 1)
    kernel(const __grid_constant__ RankCall mine, const RankCall* all) {
  __shared__ BlockShared shared;
  const int blocks = mine.plan.blocks();
  CudaBlock block{static_cast<int>(blockIdx.x) % blocks};
  const RankCall& call = all == nullptr ? mine : all[blockIdx.x / blocks];
  run_call<CudaBlock, Types>(block, shared, call);
}

}  // namespace jaxring::cuda
