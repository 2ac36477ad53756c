// The kernel of floats of 16 bits and more, and complex numbers.
#include "xla_ffi/cuda/kernel.cuh"

namespace jaxring::cuda {

const void* floats_kernel() {
  return reinterpret_cast<const void*>(
      &kernel<DTypeList<Float16, BFloat16, float, double, Complex<float>, Complex<double>>>);
}

}  // namespace jaxring::cuda
