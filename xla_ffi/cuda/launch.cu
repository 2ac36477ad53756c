// Launching: which kernel, how many blocks, and whether they are all co-resident.
#include <cuda_runtime.h>

#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/plan.h"

namespace jaxring::cuda {

// Each in its own kernels_*.cu.
const void* moves_kernel();
const void* integers_kernel();
const void* floats_kernel();
const void* float8_kernel();
const void* multimem_kernel();

namespace {

const void* kernel_of(const Plan& plan) {
  if (!reduces(plan.collective)) return moves_kernel();
  if (plan.road == Road::kMultimem) return multimem_kernel();
  return visit_dtype(plan.dtype, [](auto storage) {
    using T = decltype(storage);
    if constexpr (std::is_integral_v<T>) return integers_kernel();
    if constexpr (is_float_v<T> && sizeof(T) == 1) return float8_kernel();
    return floats_kernel();
  });
}

std::optional<std::string> text_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return std::nullopt;
  return std::string(what) + ": " + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) +
         ")";
}

std::optional<std::string> coresident_blocks(const void* kernel, int* blocks) {
  int device = 0, processors = 0, per_processor = 0;
  if (auto error = text_of(cudaGetDevice(&device), "cudaGetDevice")) return error;
  if (auto error =
          text_of(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
                  "cudaDeviceGetAttribute")) {
    return error;
  }
  if (auto error = text_of(
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, kThreads, 0),
          "cudaOccupancyMaxActiveBlocksPerMultiprocessor")) {
    return error;
  }
  *blocks = processors * per_processor;
  return std::nullopt;
}

}  // namespace

int64_t arena_bytes(int world_size) { return layout_of(kArenaShape, world_size).bytes; }
int64_t window_bytes() { return window_bytes_of(kArenaShape); }

bool serves(const KernelCall& call, int world_size, std::string* why_not) {
  const std::optional<std::string> refusal = refusal_of(call, world_size, kArenaShape);
  if (refusal && why_not != nullptr) *why_not = *refusal;
  return !refusal;
}

std::optional<std::string> load_all() {
  for (const void* kernel :
       {moves_kernel(), integers_kernel(), floats_kernel(), float8_kernel(), multimem_kernel()}) {
    cudaFuncAttributes attributes;  // asking for them loads the kernel
    if (auto error = text_of(cudaFuncGetAttributes(&attributes, kernel), "loading a kernel")) {
      return error;
    }
    int blocks = 0;
    if (auto error = coresident_blocks(kernel, &blocks)) return error;
    if (blocks < kArenaShape.blocks) {
      return "the CUDA kernels need " + std::to_string(kArenaShape.blocks) +
             " blocks to run at once, but this GPU holds " + std::to_string(blocks) +
             "; use fallback=\"lax\"";
    }
  }
  return std::nullopt;
}

std::optional<std::string> launch(const DeviceWorld& world, const KernelCall& call,
                                  CUstream_st* stream) {
  if (auto refusal = refusal_of(call, world.world_size, kArenaShape)) return refusal;
  const Plan plan = plan_of(call, world.world_size, kArenaShape);
  RankCall mine = rank_call(world, call, plan);
  const RankCall* all = nullptr;
  void* arguments[] = {&mine, &all};
  return text_of(
      cudaLaunchKernel(kernel_of(plan), dim3(plan.blocks()), dim3(kThreads), arguments, 0, stream),
      "launching a collective");
}

std::optional<std::string> launch_all_ranks(const DeviceWorld* worlds, const KernelCall* calls,
                                            int ranks, CUstream_st* stream) {
  if (auto refusal = refusal_of(calls[0], ranks, kArenaShape)) return refusal;
  const Plan plan = plan_of(calls[0], ranks, kArenaShape);
  const void* kernel = kernel_of(plan);
  int most = 0;
  if (auto error = coresident_blocks(kernel, &most)) return error;
  if (plan.blocks() * ranks > most) {
    return std::to_string(ranks) + " ranks of " + std::to_string(plan.blocks()) +
           " blocks don't fit this GPU, which holds " + std::to_string(most) +
           " at once; set max_blocks to " + std::to_string(most / ranks);
  }
  // In rank 0's arena, which each launch may overwrite: launches on a stream follow each other.
  RankCall table[kMaxRanks];
  static_assert(sizeof(table) <= kTableBytes, "the arena has room for the calls of all ranks");
  for (int rank = 0; rank < ranks; ++rank) table[rank] = rank_call(worlds[rank], calls[rank], plan);
  RankCall* all = reinterpret_cast<RankCall*>(worlds[0].arenas[0] + plan.arena.table);
  if (auto error = text_of(
          cudaMemcpyAsync(all, table, ranks * sizeof(RankCall), cudaMemcpyHostToDevice, stream),
          "copying the ranks' calls")) {
    return error;
  }
  void* arguments[] = {&table[0], &all};
  return text_of(cudaLaunchCooperativeKernel(kernel, dim3(plan.blocks() * ranks), dim3(kThreads),
                                             arguments, 0, stream),
                 "launching a collective of all ranks");
}

}  // namespace jaxring::cuda
