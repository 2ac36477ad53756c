// The kernel of sums that NVLink's switches make.
#include "xla_ffi/cuda/kernel.cuh"

namespace jaxring::cuda {

const void* multimem_kernel() { return reinterpret_cast<const void*>(&kernel<MultimemTypes>); }

}  // namespace jaxring::cuda
