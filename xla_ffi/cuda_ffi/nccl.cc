#include "xla_ffi/cuda_ffi/nccl.h"

#include <dlfcn.h>

#include <mutex>

#include "xla_ffi/core/dtype.h"

namespace jaxring::cuda {
namespace {

template <typename Function>
bool look_up(void* library, const char* name, Function* function, std::string* why_not) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return true;
  *why_not = "the NCCL of this process has no " + std::string(name);
  return false;
}

bool fill(void* library, Nccl* nccl, std::string* why_not) {
  int (*version)(int*) = nullptr;
  if (!look_up(library, "ncclGetVersion", &version, why_not)) return false;
  if (version(&nccl->version) != 0 || nccl->version < kOldestNccl) {
    *why_not = "the NCCL of this process is version " + std::to_string(nccl->version) +
               ", older than " + std::to_string(kOldestNccl);
    return false;
  }
  return look_up(library, "ncclGetErrorString", &nccl->error_text, why_not) &&
         look_up(library, "ncclCommCount", &nccl->comm_count, why_not) &&
         look_up(library, "ncclCommUserRank", &nccl->comm_user_rank, why_not) &&
         look_up(library, "ncclCommSplit", &nccl->comm_split, why_not) &&
         look_up(library, "ncclCommAbort", &nccl->comm_abort, why_not) &&
         look_up(library, "ncclAllReduce", &nccl->all_reduce, why_not) &&
         look_up(library, "ncclReduce", &nccl->reduce, why_not) &&
         look_up(library, "ncclReduceScatter", &nccl->reduce_scatter, why_not) &&
         look_up(library, "ncclAllGather", &nccl->all_gather, why_not) &&
         look_up(library, "ncclBroadcast", &nccl->broadcast, why_not) &&
         look_up(library, "ncclSend", &nccl->send, why_not) &&
         look_up(library, "ncclRecv", &nccl->receive, why_not) &&
         look_up(library, "ncclGroupStart", &nccl->group_start, why_not) &&
         look_up(library, "ncclGroupEnd", &nccl->group_end, why_not);
}

// NCCL's number of the dtype and how many of its elements one of ours is; -1 if it has none.
struct NcclType {
  int dtype = -1;
  int elements = 1;
};

NcclType type_to_reduce(const KernelCall& call) {
  const bool adds = call.op == ReduceOp::kSum || call.op == ReduceOp::kMean;
  switch (call.dtype) {
    case DType::kInt8:
      return {0};
    case DType::kBool:  // as bytes of 0 and 1
    case DType::kUInt8:
      return {kNcclUint8};
    case DType::kInt32:
      return {2};
    case DType::kUInt32:
      return {3};
    case DType::kInt64:
      return {4};
    case DType::kUInt64:
      return {5};
    case DType::kFloat32:
      return {7};
    case DType::kFloat64:
      return {8};
    case DType::kComplex64:
      return adds ? NcclType{7, 2} : NcclType{};
    case DType::kComplex128:
      return adds ? NcclType{8, 2} : NcclType{};
    default:
      return {};  // 16- and 8-bit floats would be rounded at every hop, other integers don't exist
  }
}

NcclType type_of(const KernelCall& call) {
  if (reduces(call.collective)) return type_to_reduce(call);
  return {kNcclUint8, static_cast<int>(size_of(call.dtype))};
}

int op_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return 0;
    case ReduceOp::kProd:
      return 1;
    case ReduceOp::kMax:
    case ReduceOp::kOr:
      return 2;
    case ReduceOp::kMin:
    case ReduceOp::kAnd:
      return 3;
    case ReduceOp::kMean:
      return 4;
  }
  return 0;
}

// Blocks between all ranks, or (ppermute) the whole operand from one rank to another.
int exchange(const Nccl& nccl, NcclComm comm, int rank, int world_size, const KernelCall& call,
             NcclType type, Stream stream) {
  const bool permutes = call.collective == Collective::kPermute;
  const size_t count = call.count * type.elements / (permutes ? 1 : world_size);
  const int64_t bytes = static_cast<int64_t>(count);  // moved as bytes
  int result = nccl.group_start();
  for (int peer = 0; peer < world_size && result == 0; ++peer) {
    const int64_t block = permutes ? 0 : peer * bytes;
    if (!permutes || call.destinations[rank] == peer) {
      result = nccl.send(static_cast<const char*>(call.input) + block, count, type.dtype, peer,
                         comm, stream);
    }
    if (result == 0 && (!permutes || call.destinations[peer] == rank)) {
      result = nccl.receive(static_cast<char*>(call.output) + block, count, type.dtype, peer, comm,
                            stream);
    }
  }
  const int end = nccl.group_end();
  return result != 0 ? result : end;
}

bool receives(const KernelCall& call, int rank, int world_size) {
  if (call.collective == Collective::kReduce) return call.root == rank;
  if (call.collective != Collective::kPermute) return true;
  for (int peer = 0; peer < world_size; ++peer) {
    if (call.destinations[peer] == rank) return true;
  }
  return false;
}

}  // namespace

const Nccl* loaded_nccl(std::string* why_not) {
  static std::mutex mutex;
  static Nccl nccl;
  static bool found = false;  // once there it stays; until then XLA may still load it
  std::lock_guard<std::mutex> lock(mutex);
  if (found) return &nccl;
  // RTLD_NOLOAD: this never loads anything.
  void* library = dlopen("libnccl.so.2", RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) {
    *why_not =
        "NCCL (libnccl.so.2) is not loaded in this process; XLA loads it with its first "
        "program for several GPUs";
    return nullptr;
  }
  found = fill(library, &nccl, why_not);
  return found ? &nccl : nullptr;
}

Failure nccl_failure(const Nccl& nccl, int result, const char* what) {
  if (result == 0) return std::nullopt;
  return std::string(what) + ": " + nccl.error_text(result);
}

bool nccl_serves(const KernelCall& call, std::string* why_not) {
  if (call.deterministic) {
    *why_not = "deterministic=True asks for rank-order sums, which NCCL does not give";
    if (reduces(call.collective)) return false;
  }
  if (type_of(call).dtype >= 0) return true;
  *why_not = "NCCL has no " + std::string(name_of(call.op)) + " of " + name_of(call.dtype) +
             " with one rounding at the end";
  return false;
}

Failure run_by_nccl(const Nccl& nccl, NcclComm comm, int rank, int world_size,
                    const KernelCall& call, Stream stream) {
  const NcclType type = type_of(call);
  const size_t count = call.count * type.elements;
  const int op = op_of(call.op);
  int result = 0;
  switch (call.collective) {
    case Collective::kAllreduce:
      result = nccl.all_reduce(call.input, call.output, count, type.dtype, op, comm, stream);
      break;
    case Collective::kReduceScatter:
      result = nccl.reduce_scatter(call.input, call.output, count / world_size, type.dtype, op,
                                   comm, stream);
      break;
    case Collective::kAllGather:
      result = nccl.all_gather(call.input, call.output, count, type.dtype, comm, stream);
      break;
    case Collective::kBroadcast:
      result = nccl.broadcast(call.input, call.output, count, type.dtype, call.root, comm, stream);
      break;
    case Collective::kReduce:
      result = nccl.reduce(call.input, call.output, count, type.dtype, op, call.root, comm, stream);
      break;
    case Collective::kAllToAll:
    case Collective::kPermute:
      result = exchange(nccl, comm, rank, world_size, call, type, stream);
      break;
    case Collective::kBarrier:  // comes as an allreduce
      break;
  }
  if (Failure failure = nccl_failure(nccl, result, "NCCL")) return failure;
  if (receives(call, rank, world_size)) return std::nullopt;
  return backend().runtime->fill_zero(
      call.output, call.count * static_cast<int64_t>(size_of(call.dtype)), stream);
}

Failure allreduce_by_nccl(const Nccl& nccl, NcclComm comm, const KernelCall& like,
                          const void* input, void* output, int64_t count, Stream stream) {
  const NcclType type = type_of(like);
  return nccl_failure(nccl,
                      nccl.all_reduce(input, output, count * type.elements, type.dtype,
                                      op_of(like.op), comm, stream),
                      "ncclAllReduce");
}

}  // namespace jaxring::cuda
