// The CUDA runtime behind Runtime. cudart is linked statically: it looks for the driver at its
// first call, so a process that never asks for a GPU never loads one.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstring>

#include "xla_ffi/cuda_ffi/card.h"
#include "xla_ffi/cuda_ffi/runtime.h"

namespace jaxring::cuda {
namespace {

static_assert(sizeof(IpcHandle) == sizeof(cudaIpcMemHandle_t));

Failure check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return std::nullopt;
  cudaGetLastError();  // it would be reported again by the next launch
  return std::string(what) + ": " + cudaGetErrorString(error);
}

Failure device_count(int* count) { return check(cudaGetDeviceCount(count), "cudaGetDeviceCount"); }
Failure current_device(int* device) { return check(cudaGetDevice(device), "cudaGetDevice"); }
Failure set_device(int device) { return check(cudaSetDevice(device), "cudaSetDevice"); }

Failure versions(int* driver, int* runtime) {
  if (Failure failure = check(cudaDriverGetVersion(driver), "cudaDriverGetVersion")) return failure;
  return check(cudaRuntimeGetVersion(runtime), "cudaRuntimeGetVersion");
}

Failure allocate_zeroed(void** memory, int64_t bytes) {
  if (Failure failure = check(cudaMalloc(memory, bytes), "cudaMalloc")) return failure;
  if (Failure failure = check(cudaMemset(*memory, 0, bytes), "cudaMemset")) return failure;
  // cudaMemset of device memory is asynchronous, and peers may look at it at once.
  return check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
}
void release(void* memory) { cudaFree(memory); }

Failure allocate_pinned(void** host, void** device, int64_t bytes) {
  const unsigned flags = cudaHostAllocMapped | cudaHostAllocPortable;
  if (Failure failure = check(cudaHostAlloc(host, bytes, flags), "cudaHostAlloc")) return failure;
  std::memset(*host, 0, bytes);
  return check(cudaHostGetDevicePointer(device, *host, 0), "cudaHostGetDevicePointer");
}
void release_pinned(void* host) { cudaFreeHost(host); }

Failure export_memory(void* memory, IpcHandle* handle) {
  return check(cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t*>(handle), memory),
               "cudaIpcGetMemHandle");
}
Failure import_memory(const IpcHandle& handle, void** memory) {
  cudaIpcMemHandle_t native;
  std::memcpy(&native, &handle, sizeof native);
  return check(cudaIpcOpenMemHandle(memory, native, cudaIpcMemLazyEnablePeerAccess),
               "cudaIpcOpenMemHandle");
}
void release_import(void* memory) { cudaIpcCloseMemHandle(memory); }

Failure can_access_peer(int device, int peer, bool* can) {
  int answer = 1;
  if (device != peer) {
    if (Failure failure =
            check(cudaDeviceCanAccessPeer(&answer, device, peer), "cudaDeviceCanAccessPeer")) {
      return failure;
    }
  }
  *can = answer != 0;
  return std::nullopt;
}
Failure enable_peer_access(int peer) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {  // XLA has done it
    cudaGetLastError();
    return std::nullopt;
  }
  return check(error, "cudaDeviceEnablePeerAccess");
}

Failure create_stream(Stream* stream) {
  return check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking), "cudaStreamCreate");
}
void release_stream(Stream stream) { cudaStreamDestroy(stream); }

Failure copy(void* to, const void* from, int64_t bytes, Stream stream) {
  return check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}
Failure fill_zero(void* memory, int64_t bytes, Stream stream) {
  return check(cudaMemsetAsync(memory, 0, bytes, stream), "cudaMemsetAsync");
}
StreamState query(Stream stream, std::string* why) {
  const cudaError_t error = cudaStreamQuery(stream);
  if (error == cudaSuccess) return StreamState::kDone;
  cudaGetLastError();
  if (error == cudaErrorNotReady) return StreamState::kBusy;
  *why = cudaGetErrorString(error);
  return StreamState::kFailed;
}

void identify(int, uint64_t* host, int64_t* pid) {
  *host = host_identity();
  *pid = getpid();
}

}  // namespace

const Runtime& cuda_runtime() {
  static const Runtime runtime = {
      device_count,       current_device, set_device,      versions,
      allocate_zeroed,    release,        allocate_pinned, release_pinned,
      export_memory,      import_memory,  release_import,  can_access_peer,
      enable_peer_access, create_stream,  release_stream,  copy,
      fill_zero,          query,          identify,
  };
  return runtime;
}

const Kernels& cuda_kernels() {
  static const Kernels kernels = {arena_bytes, serves, load_all, window_bytes, traffic_of, launch};
  return kernels;
}

}  // namespace jaxring::cuda
