// Reductions by all threads of a block: operands, in the order given -> destinations.
//
// The operation is a run-time argument. The choice is made once per group and thread, which nothing
// that waits for memory notices, and one function per dtype serves all operations.
#pragma once

#include <cstdint>

#include "xla_ffi/core/reduce_op.h"
#include "xla_ffi/cuda/pack.h"
#include "xla_ffi/cuda/plan.h"

namespace jaxring::cuda {

// Each operand holds elements or, where `wide_operands` has its bit, accumulators; all destinations
// hold the same of the two. The arrays are the block's shared memory.
struct Fold {
  const char* const* operands;
  char* const* destinations;
  int operand_count;
  int destination_count;
  uint32_t wide_operands;
  bool wide_destinations;
  ReduceOp op;
  int64_t divisor;  // of a mean; 0: none

  JR_DEVICE bool is_wide(int operand) const { return (wide_operands >> operand & 1) != 0; }
};

// sum[i] = sum[i] op next[i]
template <typename T, int kCount>
JR_DEVICE JR_INLINE void combine(ReduceOp op, AccumulatorOf<T>* sum, const AccumulatorOf<T>* next) {
  const auto with = [&](auto functor) {
    if constexpr (decltype(functor)::template supports<T>) {
      JR_UNROLL
      for (int i = 0; i < kCount; ++i) sum[i] = functor(sum[i], next[i]);
    }
  };
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return with(Sum());
    case ReduceOp::kProd:
      return with(Prod());
    case ReduceOp::kMin:
      return with(Min());
    case ReduceOp::kMax:
      return with(Max());
    case ReduceOp::kAnd:
      return with(And());
    case ReduceOp::kOr:
      return with(Or());
  }
}

template <typename T, int kCount>
JR_DEVICE JR_INLINE void finish(int64_t divisor, AccumulatorOf<T>* sum) {
  if constexpr (Mean::supports<T>) {
    if (divisor == 0) return;
    JR_UNROLL
    for (int i = 0; i < kCount; ++i) sum[i] = divide(sum[i], divisor);
  }
}

// A group is kLanes<T> elements: one pack of elements, or several of accumulators.
template <typename T>
inline constexpr int kWidePacks = static_cast<int>(sizeof(AccumulatorOf<T>) / sizeof(T));

template <typename T, class Block>
JR_DEVICE JR_INLINE void load_group(Block& block, const char* from, bool wide, int64_t group,
                                    AccumulatorOf<T>* values) {
  using A = AccumulatorOf<T>;
  if (wide && kWidePacks<T> > 1) {
    JR_UNROLL
    for (int k = 0; k < kWidePacks<T>; ++k) {
      unpack<A>(block.load16(from + (group * kWidePacks<T> + k) * kPackBytes),
                values + k * kLanes<A>);
    }
  } else {
    unpack<T>(block.load16(from + group * kPackBytes), values);
  }
}

template <typename T, class Block>
JR_DEVICE JR_INLINE void store_group(Block& block, char* to, bool wide, int64_t group,
                                     const AccumulatorOf<T>* values) {
  using A = AccumulatorOf<T>;
  if (wide && kWidePacks<T> > 1) {
    JR_UNROLL
    for (int k = 0; k < kWidePacks<T>; ++k) {
      block.store16(to + (group * kWidePacks<T> + k) * kPackBytes,
                    packed<A>(values + k * kLanes<A>));
    }
  } else {
    block.store16(to + group * kPackBytes, packed<T>(values));
  }
}

// kGroups groups, `stride` apart, so that so many loads are in flight.
template <typename T, int kGroups, class Block>
JR_DEVICE JR_INLINE void fold_groups(Block& block, const Fold& fold, int64_t first,
                                     int64_t stride) {
  constexpr int kLaneCount = kLanes<T>;
  AccumulatorOf<T> sum[kGroups * kLaneCount];
  const auto load = [&](int operand, AccumulatorOf<T>* values) {
    JR_UNROLL
    for (int k = 0; k < kGroups; ++k) {
      load_group<T>(block, fold.operands[operand], fold.is_wide(operand), first + k * stride,
                    values + k * kLaneCount);
    }
  };
  load(0, sum);
  for (int operand = 1; operand < fold.operand_count; ++operand) {
    AccumulatorOf<T> next[kGroups * kLaneCount];
    load(operand, next);
    combine<T, kGroups * kLaneCount>(fold.op, sum, next);
  }
  if (!fold.wide_destinations) finish<T, kGroups * kLaneCount>(fold.divisor, sum);
  for (int d = 0; d < fold.destination_count; ++d) {
    JR_UNROLL
    for (int k = 0; k < kGroups; ++k) {
      store_group<T>(block, fold.destinations[d], fold.wide_destinations, first + k * stride,
                     sum + k * kLaneCount);
    }
  }
}

// What is no whole group, or not aligned as one.
template <typename T>
JR_DEVICE JR_INLINE void fold_element(const Fold& fold, int64_t i) {
  using A = AccumulatorOf<T>;
  const auto load = [&](int operand) {
    const char* from = fold.operands[operand];
    return fold.is_wide(operand) ? reinterpret_cast<const A*>(from)[i]
                                 : static_cast<A>(reinterpret_cast<const T*>(from)[i]);
  };
  A sum = load(0);
  for (int operand = 1; operand < fold.operand_count; ++operand) {
    const A next = load(operand);
    combine<T, 1>(fold.op, &sum, &next);
  }
  if (!fold.wide_destinations) finish<T, 1>(fold.divisor, &sum);
  for (int d = 0; d < fold.destination_count; ++d) {
    char* to = fold.destinations[d];
    if (fold.wide_destinations) {
      reinterpret_cast<A*>(to)[i] = sum;
    } else {
      reinterpret_cast<T*>(to)[i] = static_cast<T>(sum);
    }
  }
}

// Folds `count` elements. Every thread of the block calls it; it has no barrier.
template <typename T, class Block>
JR_DEVICE JR_NOINLINE void run_fold(Block& block, const Fold& fold, int64_t count) {
  // As registers and compile time allow; conversions keep bytes busy anyway.
  constexpr int kGroups = kLanes<T> > 8 ? 1 : 4;
  bool aligned = true;
  for (int i = 0; i < fold.operand_count; ++i) {
    aligned = aligned && is_aligned(fold.operands[i], kPackBytes);
  }
  for (int i = 0; i < fold.destination_count; ++i) {
    aligned = aligned && is_aligned(fold.destinations[i], kPackBytes);
  }
  const int64_t groups = aligned ? count / kLanes<T> : 0;
  const int64_t stride = block.thread_count();
  int64_t group = block.thread();
  if constexpr (kGroups > 1) {
    for (; group + (kGroups - 1) * stride < groups; group += kGroups * stride) {
      fold_groups<T, kGroups>(block, fold, group, stride);
    }
  }
  for (; group < groups; group += stride) fold_groups<T, 1>(block, fold, group, stride);
  for (int64_t i = groups * kLanes<T> + block.thread(); i < count; i += stride) {
    fold_element<T>(fold, i);
  }
}

// A pack's elements as accumulators, of any dtype; in memory that a call can pass.
struct alignas(16) WideGroup {
  char bytes[4 * kPackBytes];
};

// sum op packs, or packs alone. For the few packs of a small message.
template <typename T>
JR_DEVICE JR_NOINLINE void fold_packs_of(ReduceOp op, const Pack* packs, int count, bool has_sum,
                                         WideGroup* group) {
  AccumulatorOf<T> sum[kLanes<T>];
  static_assert(sizeof(sum) <= sizeof(WideGroup), "accumulators are at most four times as wide");
  if (has_sum) {
    memcpy(sum, group->bytes, sizeof(sum));
  } else {
    unpack<T>(packs[0], sum);
  }
  for (int i = has_sum ? 0 : 1; i < count; ++i) {
    AccumulatorOf<T> next[kLanes<T>];
    unpack<T>(packs[i], next);
    combine<T, kLanes<T>>(op, sum, next);
  }
  memcpy(group->bytes, sum, sizeof(sum));
}

template <typename T>
JR_DEVICE JR_INLINE Pack finished_pack_of(int64_t divisor, const WideGroup* group) {
  AccumulatorOf<T> sum[kLanes<T>];
  memcpy(sum, group->bytes, sizeof(sum));
  finish<T, kLanes<T>>(divisor, sum);
  return packed<T>(sum);
}

// Some dtypes, chosen among at run time. The empty list is for collectives that only move.
template <typename... Ts>
struct DTypeList {
  static constexpr bool reduces = sizeof...(Ts) > 0;
  static constexpr bool by_multimem = false;

  template <class Block>
  static JR_DEVICE void fold([[maybe_unused]] Block& block, [[maybe_unused]] const Plan& plan,
                             [[maybe_unused]] const Fold& fold, [[maybe_unused]] int64_t bytes) {
    (void)((plan.dtype == DTypeTraits<Ts>::dtype &&
            (run_fold<Ts>(block, fold, bytes / static_cast<int64_t>(sizeof(Ts))), true)) ||
           ...);
  }
  static JR_DEVICE void fold_packs([[maybe_unused]] const Plan& plan,
                                   [[maybe_unused]] const Pack* packs, [[maybe_unused]] int count,
                                   [[maybe_unused]] bool has_sum, [[maybe_unused]] WideGroup* sum) {
    (void)((plan.dtype == DTypeTraits<Ts>::dtype &&
            (fold_packs_of<Ts>(plan.op, packs, count, has_sum, sum), true)) ||
           ...);
  }
  static JR_DEVICE Pack finished_pack([[maybe_unused]] const Plan& plan,
                                      [[maybe_unused]] const WideGroup* sum) {
    Pack pack{};
    (void)((plan.dtype == DTypeTraits<Ts>::dtype &&
            (pack = finished_pack_of<Ts>(plan.divisor, sum), true)) ||
           ...);
    return pack;
  }
};

}  // namespace jaxring::cuda
