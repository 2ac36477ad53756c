// What the handlers and communicators call of CUDA, as tables of functions: the real ones are in
// cuda_runtime.cc, the only file here that needs CUDA's headers; tests put a device that lives in
// host memory in their place.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "xla_ffi/cuda/kernels.h"

namespace jaxring::cuda {

using Stream = CUstream_st*;

// The text of an error, or nothing.
using Failure = std::optional<std::string>;

// As cudaIpcMemHandle_t; a static assertion in cuda_runtime.cc holds its size.
struct IpcHandle {
  char bytes[64];
};

enum class StreamState { kBusy, kDone, kFailed };

// All of them but those marked act on the current device and may wait for it, so they are for
// set-up only.
struct Runtime {
  Failure (*device_count)(int* count);
  Failure (*current_device)(int* device);
  Failure (*set_device)(int device);
  Failure (*versions)(int* driver, int* runtime);  // as CUDA counts them: 13000 is 13.0
  Failure (*allocate_zeroed)(void** memory, int64_t bytes);
  void (*release)(void* memory);
  // Host memory that kernels can write, zeroed.
  Failure (*allocate_pinned)(void** host, void** device, int64_t bytes);
  void (*release_pinned)(void* host);
  Failure (*export_memory)(void* memory, IpcHandle* handle);
  Failure (*import_memory)(const IpcHandle& handle, void** memory);
  void (*release_import)(void* memory);
  Failure (*can_access_peer)(int device, int peer, bool* can);
  Failure (*enable_peer_access)(int peer);  // of the current device to the peer's memory
  Failure (*create_stream)(Stream* stream);
  void (*release_stream)(Stream stream);
  // Enqueue only; also in Execute. Any of host, this device's and a mapped peer's memory.
  Failure (*copy)(void* to, const void* from, int64_t bytes, Stream stream);
  Failure (*fill_zero)(void* memory, int64_t bytes, Stream stream);
  StreamState (*query)(Stream stream, std::string* why);
  // Which host and process a device of this process is of: always ours, but for tests.
  void (*identify)(int device, uint64_t* host, int64_t* pid);
};

struct Kernels {
  int64_t (*arena_bytes)(int world_size);
  bool (*serves)(const KernelCall& call, int world_size, std::string* why_not);
  Failure (*load_all)();
  int64_t (*window_bytes)();
  Traffic (*traffic)(const KernelCall& call, int rank, int world_size);
  Failure (*launch)(const DeviceWorld& world, const KernelCall& call, Stream stream);
};

struct Nccl;
struct MulticastApi;

// What stands behind everything in this folder. Set once, before the first use.
struct Backend {
  const Runtime* runtime = nullptr;
  const Kernels* kernels = nullptr;
  // NCCL as this process has it loaded, or null with the reason.
  const Nccl* (*nccl)(std::string* why_not) = nullptr;
  const MulticastApi* multicast = nullptr;  // null: none
};

inline Backend& backend() {
  static Backend instance;
  return instance;
}

// The real ones.
const Runtime& cuda_runtime();
const Kernels& cuda_kernels();

// Makes a device current for a scope.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    failure_ = backend().runtime->current_device(&before_);
    if (!failure_ && before_ != device) failure_ = backend().runtime->set_device(device);
  }
  ~OnDevice() { backend().runtime->set_device(before_); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const Failure& failure() const { return failure_; }

 private:
  int before_ = 0;
  Failure failure_;
};

}  // namespace jaxring::cuda
