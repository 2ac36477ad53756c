// The kernel of 8-bit floats.
#include "xla_ffi/cuda/kernel.cuh"

namespace jaxring::cuda {

const void* float8_kernel() {
  return reinterpret_cast<const void*>(
      &kernel<DTypeList<Float8E3M4, Float8E4M3, Float8E4M3Fn, Float8E4M3Fnuz, Float8E4M3B11Fnuz,
                        Float8E5M2, Float8E5M2Fnuz>>);
}

}  // namespace jaxring::cuda
