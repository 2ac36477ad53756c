// The seam between fold(), compiled once, and its loops, compiled for each CPU level.
#pragma once

#include <cstdint>

#include "xla_ffi/core/dtype.h"
#include "xla_ffi/core/reduce_op.h"
#include "xla_ffi/host/reduce_kernels.h"

namespace jaxring {

// Loops over `count` elements. "Wide" elements are accumulators, others of the dtype's own type. A
// source and the destination may be the same address if their elements have one size, else they
// don't overlap. Entries are null where there is nothing to do (an operation without a meaning for
// the dtype, a type that is its own accumulator) or no loop of that kind.
struct KernelTable {
  using Combine = void (*)(const void* left, const void* right, void* dst, int64_t count);
  using Convert = void (*)(const void* src, void* dst, int64_t count);
  using Divide = void (*)(const void* src, void* dst, int64_t count, int64_t divisor);

  Combine combine[kReduceOpCount][kDTypeCount];  // wide and wide to wide
  Combine mixed_sum[kDTypeCount][2][2][2];       // [left is wide][right is wide][dst is wide]
  Convert widen[kDTypeCount];
  Convert narrow[kDTypeCount];  // rounds
  Divide divide[kDTypeCount];   // wide to wide
};

struct CpuLevel {
  const char* name;
  const KernelTable* kernels;
};

// The levels that were compiled and that this CPU can run, best first; index 0 … *count - 1.
const CpuLevel* cpu_levels(int* count);

// fold() with the kernels of one level.
void fold_with(const KernelTable& kernels, DType dtype, ReduceOp op, const Operand* operands,
               int operand_count, void* dst, bool dst_partial, int64_t count, int64_t divisor,
               bool streamed = false);

}  // namespace jaxring
