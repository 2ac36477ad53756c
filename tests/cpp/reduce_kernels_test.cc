#include "xla_ffi/host/reduce_kernels.h"
#include <gtest/gtest.h>
TEST(ReduceKernels, Sum) {
  float a[3] = {1, 2, 3}, b[3] = {10, 20, 30}, c[3];
  jaxring::Operand ops[2] = {{a, false}, {b, false}};
  jaxring::fold(jaxring::DType::kFloat32, jaxring::ReduceOp::kMean, ops, 2, c, false, 3, 2);
  EXPECT_EQ(c[2], 16.5f);
}
