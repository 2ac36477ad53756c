// NCCL as the process has it: never linked and never loaded by us. XLA loads it when it needs it,
// and a second copy corrupts both ("corrupted comm object", jax#39167).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "xla_ffi/cuda_ffi/runtime.h"

struct ncclComm;

namespace jaxring::cuda {

using NcclComm = ncclComm*;

// The functions and numbers below are NCCL's stable C ABI (nccl.h since 2.18).
struct Nccl {
  int version;  // 22809 is 2.28.9
  const char* (*error_text)(int result);
  int (*comm_count)(NcclComm comm, int* count);
  int (*comm_user_rank)(NcclComm comm, int* rank);
  int (*comm_split)(NcclComm comm, int color, int key, NcclComm* child, void* config);
  int (*comm_abort)(NcclComm comm);  // releases it, whatever state its ranks are in
  int (*all_reduce)(const void* in, void* out, size_t count, int dtype, int op, NcclComm, Stream);
  int (*reduce)(const void* in, void* out, size_t count, int dtype, int op, int root, NcclComm,
                Stream);
  int (*reduce_scatter)(const void* in, void* out, size_t count_out, int dtype, int op, NcclComm,
                        Stream);
  int (*all_gather)(const void* in, void* out, size_t count_in, int dtype, NcclComm, Stream);
  int (*broadcast)(const void* in, void* out, size_t count, int dtype, int root, NcclComm, Stream);
  int (*send)(const void* in, size_t count, int dtype, int peer, NcclComm, Stream);
  int (*receive)(void* out, size_t count, int dtype, int peer, NcclComm, Stream);
  int (*group_start)();
  int (*group_end)();
};

inline constexpr int kOldestNccl = 21800;  // the first with ncclCommSplit
inline constexpr int kNcclUint8 = 1;

// The table of the copy that is loaded, or null with the reason.
const Nccl* loaded_nccl(std::string* why_not);

Failure nccl_failure(const Nccl& nccl, int result, const char* what);

// Whether NCCL can carry the call on its own; if not, why.
bool nccl_serves(const KernelCall& call, std::string* why_not);

// Enqueues the whole call on the clique's communicator.
Failure run_by_nccl(const Nccl& nccl, NcclComm comm, int rank, int world_size,
                    const KernelCall& call, Stream stream);

// Enqueues an allreduce of `count` elements with the op and dtype of `like`.
Failure allreduce_by_nccl(const Nccl& nccl, NcclComm comm, const KernelCall& like,
                          const void* input, void* output, int64_t count, Stream stream);

}  // namespace jaxring::cuda
