// Proves with nvcc, and without a GPU, that each schedule in the registry compiles for the device
// from the one source that the host runs. tests/cpp/block_shim_test.cc runs the same code.
#include "xla_ffi/algorithms/registry.h"
#include "xla_ffi/cuda/primitives.cuh"
#include "xla_ffi/cuda/ptx.cuh"

namespace jaxring {

// One rank and channel per block.
template <Algorithm algorithm, typename T, class Functor>
__global__ void allreduce_kernel(const BlockWork<T>* work, World world, Range message,
                                 int channel) {
  __shared__ SliceSlots slots;
  CudaBlock block;
  BlockPrims<CudaBlock, T, Functor> prims(block, slots, *work);
  run_allreduce(algorithm, channel, prims, world, message);
}

#define JR_X(enumerator, name, channels, rank_order, summary)                       \
  template __global__ void allreduce_kernel<Algorithm::enumerator, float, Sum>(     \
      const BlockWork<float>*, World, Range, int);                                  \
  template __global__ void allreduce_kernel<Algorithm::enumerator, BFloat16, Mean>( \
      const BlockWork<BFloat16>*, World, Range, int);
JR_FOR_EACH_ALGORITHM(JR_X)
#undef JR_X

}  // namespace jaxring
