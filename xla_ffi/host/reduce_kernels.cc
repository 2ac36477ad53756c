#include "xla_ffi/host/reduce_kernels.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "xla_ffi/host/floating_point_mode.h"
#include "xla_ffi/host/reduce_kernels_table.h"
#include "xla_ffi/host/stream.h"

namespace jaxring {

// JR_CPU_LEVELS comes from reduce_kernels.cmake: JR_LEVEL(identifier, "name") for each level above
// the baseline, best first. A list without semicolons confuses clang-format.
// clang-format off
#define JR_LEVEL(identifier, name) namespace identifier { extern const KernelTable kernel_table; }
JR_CPU_LEVELS
JR_LEVEL(baseline, "baseline")
#undef JR_LEVEL

namespace {

#define JR_LEVEL(identifier, name) +1
constexpr int kMaxLevels = 1 JR_CPU_LEVELS;
#undef JR_LEVEL
// clang-format on

struct Levels {
  CpuLevel list[kMaxLevels];
  int count = 0;

  void add(const char* name, const KernelTable& kernels) { list[count++] = {name, &kernels}; }

  Levels() {
    // clang-format off
#define JR_LEVEL(identifier, name) \
    if (__builtin_cpu_supports(name)) add(name, identifier::kernel_table);
    JR_CPU_LEVELS
#undef JR_LEVEL
    // clang-format on
    add("baseline", baseline::kernel_table);
  }
};

const Levels& levels() {
  static const Levels levels;
  return levels;
}

// Bytes of accumulators that stay in the first-level cache while all operands pass over them.
constexpr int64_t kBlockBytes = 4096;

struct alignas(64) Block {
  unsigned char bytes[kBlockBytes];
};

const void* advance(const void* data, int64_t bytes) {
  return static_cast<const unsigned char*>(data) + bytes;
}
void* advance(void* data, int64_t bytes) { return static_cast<unsigned char*>(data) + bytes; }

// One call of fold: what doesn't change from block to block. "Wide": of the accumulator type.
struct Fold {
  const KernelTable& kernels;
  DType dtype;
  ReduceOp op;
  const Operand* operands;
  int operand_count;
  void* dst;
  bool dst_partial;
  int64_t divisor;

  struct Elements {
    const void* data;
    bool wide;
  };

  int index() const { return static_cast<int>(dtype); }
  bool is_wide(bool partial) const { return partial || kernels.widen[index()] == nullptr; }
  int64_t size(bool wide) const { return wide ? accumulator_size_of(dtype) : size_of(dtype); }
  bool divides() const { return op == ReduceOp::kMean && !dst_partial && divisor != 1; }
  bool mixes_sums() const {
    return (op == ReduceOp::kSum || op == ReduceOp::kMean) && kernels.mixed_sum[index()][0][0][0];
  }

  const void* widened(Elements elements, int64_t count, Block& block) const {
    if (elements.wide) return elements.data;
    kernels.widen[index()](elements.data, block.bytes, count);
    return block.bytes;
  }

  void combine(Elements left, Elements right, void* out, bool out_wide, int64_t count) const {
    const bool all_wide = left.wide && right.wide && out_wide;
    if (!all_wide && mixes_sums()) {
      kernels.mixed_sum[index()][left.wide][right.wide][out_wide](left.data, right.data, out,
                                                                  count);
      return;
    }
    Block left_block, right_block;
    const void* wide_left = widened(left, count, left_block);
    const void* wide_right = widened(right, count, right_block);
    void* wide_out = out_wide ? out : left_block.bytes;
    kernels.combine[static_cast<int>(op)][index()](wide_left, wide_right, wide_out, count);
    if (!out_wide) kernels.narrow[index()](wide_out, out, count);
  }

  // Reads every operand's elements once, before it writes any of dst.
  void run(int64_t first, int64_t count) const {
    run_to(advance(dst, first * size(is_wide(dst_partial))), first, count);
  }
  void run_streamed(int64_t first, int64_t count) const {
    const int64_t bytes = size(is_wide(dst_partial));
    Block block;
    run_to(block.bytes, first, count);
    stream_copy(advance(dst, first * bytes), block.bytes, count * bytes);
  }

  void run_to(void* out, int64_t first, int64_t count) const {
    const bool out_wide = is_wide(dst_partial);
    Block block;
    Elements result{};
    for (int i = 0; i < operand_count; ++i) {
      const bool wide = is_wide(operands[i].partial);
      const Elements next{advance(operands[i].data, first * size(wide)), wide};
      if (i == 0) {
        result = next;
        continue;
      }
      const bool last = i == operand_count - 1 && !divides();
      void* target = last ? out : block.bytes;
      combine(result, next, target, last ? out_wide : true, count);
      result = {target, last ? out_wide : true};
    }
    if (divides()) {
      const void* sum = widened(result, count, block);
      void* quotient = out_wide ? out : block.bytes;
      kernels.divide[index()](sum, quotient, count, divisor);
      result = {quotient, true};
    }
    if (result.data == out) return;
    const auto convert = out_wide ? kernels.widen[index()] : kernels.narrow[index()];
    convert(result.data, out, count);
  }

  bool is_copy() const {
    return operand_count == 1 && !divides() && is_wide(operands[0].partial) == is_wide(dst_partial);
  }
};

}  // namespace

const CpuLevel* cpu_levels(int* count) {
  *count = levels().count;
  return levels().list;
}

const char* cpu_level() { return levels().list[0].name; }

void fold_with(const KernelTable& kernels, DType dtype, ReduceOp op, const Operand* operands,
               int operand_count, void* dst, bool dst_partial, int64_t count, int64_t divisor,
               bool streamed) {
  assert(supports(op, dtype) && operand_count >= 1 && (dst_partial || divisor >= 1));
  const StandardFloatingPoint standard_mode;
  const Fold fold{kernels, dtype, op, operands, operand_count, dst, dst_partial, divisor};
  if (fold.is_copy()) {
    if (operands[0].data != dst)
      copy_bytes(dst, operands[0].data, count * fold.size(fold.is_wide(dst_partial)), streamed);
    return;
  }
  const int64_t block = kBlockBytes / static_cast<int64_t>(accumulator_size_of(dtype));
  for (int64_t first = 0; first < count; first += block) {
    const int64_t elements = std::min(block, count - first);
    streamed ? fold.run_streamed(first, elements) : fold.run(first, elements);
  }
}

void fold(DType dtype, ReduceOp op, const Operand* operands, int operand_count, void* dst,
          bool dst_partial, int64_t count, int64_t divisor, bool streamed) {
  fold_with(*levels().list[0].kernels, dtype, op, operands, operand_count, dst, dst_partial, count,
            divisor, streamed);
}

}  // namespace jaxring
