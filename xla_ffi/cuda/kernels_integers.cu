// The kernel of booleans and integers.
#include "xla_ffi/cuda/kernel.cuh"

namespace jaxring::cuda {

const void* integers_kernel() {
  return reinterpret_cast<const void*>(&kernel<DTypeList<bool, int8_t, int16_t, int32_t, int64_t,
                                                         uint8_t, uint16_t, uint32_t, uint64_t>>);
}

}  // namespace jaxring::cuda
