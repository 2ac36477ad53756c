// The pinned memory of a seat.
#pragma once

#include <cstdint>

#include "xla_ffi/cuda_ffi/seat.h"
#include "xla_ffi/cuda_ffi/seat_exchange.h"

namespace jaxring::cuda {

struct Seat::HostWords {
  uint64_t status;   // written by the kernels: wait_status() of the first failed wait
  uint64_t stalled;  // likewise: of the last long one
  uint64_t pad[14];
  uint64_t abort;  // written by the host, in a cache line that the kernels don't write
  uint64_t pad2[15];
  char staging[kSlotBytes];
  CallLog log;  // a copy of the arena's
};

}  // namespace jaxring::cuda
