// Combining arrays on the CPU: one function, and behind it plain loops compiled for several CPU
// levels.
#pragma once

#include <cstdint>

#include "xla_ffi/core/dtype.h"
#include "xla_ffi/core/reduce_op.h"

namespace jaxring {

struct Operand {
  const void* data;
  bool partial;  // elements of the accumulator type, else of the tensor's own type
};

// dst[i] = finish(op(… op(operands[0][i], operands[1][i]) …, operands[operand_count - 1][i])), for
// i < count, always in that order. `finish` divides by `divisor` if op is mean (1 or more), then
// rounds to the tensor's type. With `dst_partial` there is no finishing: dst receives accumulators
// and divisor is not read.
//
// One operand is a converting copy. dst may be the same address as one operand of the same element
// size; other overlap is not allowed. Pointers need their element's alignment only. supports(op,
// dtype) must hold; 1 <= operand_count. The result is the same on every CPU level, bit for bit but
// for the payloads of NaNs, and whatever the calling thread's flush-to-zero flags are. `streamed`
// writes past the caches (host/stream.h).
void fold(DType dtype, ReduceOp op, const Operand* operands, int operand_count, void* dst,
          bool dst_partial, int64_t count, int64_t divisor, bool streamed = false);

// The instruction-set level in use: "x86-64-v4", "x86-64-v3" or "baseline".
const char* cpu_level();

}  // namespace jaxring
