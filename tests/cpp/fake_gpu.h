// GPUs that live in host memory: a stream is a thread that does what is enqueued, and a kernel is a
// function that finds its peers through the arenas, as the real ones do, so that handlers and
// communicators are really driven. What Execute must not do is counted.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/fake_stream.h"
#include "xla_ffi/cuda_ffi/runtime.h"

namespace jaxring::cuda {

// What a test sets and looks at.
struct FakeMachine {
  std::function<bool(int, int)> peers = [](int, int) { return true; };
  std::function<uint64_t(int)> host = [](int) { return uint64_t{1}; };
  std::function<int64_t(int)> pid = [](int) { return static_cast<int64_t>(getpid()); };
  std::atomic<int> allocations{0};
  std::atomic<int> waits{0};
  std::atomic<int> launches{0};
  std::atomic<int> loads{0};
};
inline FakeMachine& machine() {
  static FakeMachine instance;
  return instance;
}

namespace fake {

inline thread_local int device = 0;

// A rank's arena. `input` is what the rank has brought to the operation number `posted`.
struct Arena {
  std::atomic<uint64_t> posted;
  std::atomic<uint64_t> done;
  const void* input;
  char pad[kLogOffset - 24];
  CallLog log;  // where the real one is
};

inline bool wait_for(const std::atomic<uint64_t>& word, uint64_t target, int peer,
                     const DeviceWorld& world, int site) {
  const auto begin = std::chrono::steady_clock::now();
  const auto deadline = begin + std::chrono::nanoseconds(world.timeout_ns);
  bool told = false;
  while (word.load() < target) {
    const bool aborted = __atomic_load_n(world.abort, __ATOMIC_ACQUIRE) != 0;
    const auto now = std::chrono::steady_clock::now();
    if (!told && now - begin > std::chrono::nanoseconds(world.warn_ns)) {
      told = true;
      __atomic_store_n(world.stalled, wait_status(site, peer), __ATOMIC_RELEASE);
    }
    if (aborted || now >= deadline) {
      uint64_t none = 0;
      __atomic_compare_exchange_n(world.status, &none, wait_status(site, peer), false,
                                  __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
      return false;
    }
    std::this_thread::yield();
  }
  return true;
}

// Sums of T; blocks as the collective has them.
template <typename T>
std::vector<T> result_of(const DeviceWorld& world, const KernelCall& call,
                         const std::vector<const T*>& inputs) {
  const bool gathers = call.collective == Collective::kAllGather;
  const bool scatters = call.collective == Collective::kReduceScatter;
  const int64_t part = scatters ? call.count / world.world_size : call.count;
  const int64_t first = scatters ? world.rank * part : 0;
  std::vector<T> result;
  if (gathers) {
    for (const T* input : inputs) result.insert(result.end(), input, input + call.count);
    return result;
  }
  for (int64_t i = 0; i < part; ++i) {
    T sum = 0;
    for (const T* input : inputs) sum += input[first + i];
    result.push_back(sum);
  }
  return result;
}

inline void add_one(uint64_t* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_ACQ_REL); }

template <typename T>
void run(const DeviceWorld& world, const KernelCall& call) {
  if (__atomic_load_n(world.status, __ATOMIC_ACQUIRE) != 0) return;
  Arena& own = *reinterpret_cast<Arena*>(world.arenas[world.rank]);
  const uint64_t number = own.posted.load() + 1;  // the epoch: in the arena, not on the host
  add_one(&own.log.begun);
  __atomic_store_n(&own.log.site, uint64_t(call.site), __ATOMIC_RELEASE);
  own.input = call.input;
  own.posted.store(number);
  std::vector<const T*> inputs;
  for (int peer = 0; peer < world.world_size; ++peer) {
    Arena& arena = *reinterpret_cast<Arena*>(world.arenas[peer]);
    if (!wait_for(arena.posted, number, peer, world, call.site)) return;
    inputs.push_back(static_cast<const T*>(arena.input));
  }
  const std::vector<T> result = result_of<T>(world, call, inputs);
  own.done.store(number);
  for (int peer = 0; peer < world.world_size; ++peer) {
    Arena& arena = *reinterpret_cast<Arena*>(world.arenas[peer]);
    if (!wait_for(arena.done, number, peer, world, call.site)) return;
  }
  std::memcpy(call.output, result.data(), result.size() * sizeof(T));
  add_one(&own.log.ended);
  add_one(&own.log.ended_at[call.site]);
}

// What kernels.h allows of input and output.
inline bool may_overlap_so(const DeviceWorld& world, const KernelCall& call) {
  const int64_t in_bytes = call.count * static_cast<int64_t>(size_of(call.dtype));
  int64_t out_bytes = in_bytes;
  if (call.collective == Collective::kAllGather) out_bytes *= world.world_size;
  if (call.collective == Collective::kReduceScatter) out_bytes /= world.world_size;
  const char* in = static_cast<const char*>(call.input);
  const char* out = static_cast<const char*>(call.output);
  if (in + in_bytes <= out || out + out_bytes <= in) return true;
  const bool own_block =
      call.collective == Collective::kAllGather && in == out + world.rank * in_bytes;
  return own_block || (in == out && in_bytes == out_bytes);
}

inline Failure launch(const DeviceWorld& world, const KernelCall& call, Stream stream) {
  ++machine().launches;
  if (!may_overlap_so(world, call)) return "input and output overlap in a way that is not allowed";
  if (call.multimem != (world.multicast != nullptr)) return "multimem without multicast";
  stream->enqueue([world, call] {
    call.dtype == DType::kInt32 ? run<int32_t>(world, call) : run<float>(world, call);
  });
  return std::nullopt;
}

inline bool serves(const KernelCall& call, int, std::string* why_not) {
  if (call.dtype == DType::kFloat32 || call.dtype == DType::kInt32) return true;
  if (why_not != nullptr) *why_not = "the fake kernels have no such dtype";
  return false;
}

inline const Kernels kernels = {
    [](int) { return int64_t{sizeof(Arena)}; },
    serves,
    []() -> Failure {
      ++machine().loads;
      return std::nullopt;
    },
    []() { return int64_t{100}; },
    [](const KernelCall& call, int, int) {
      const int64_t bytes = call.count * static_cast<int64_t>(size_of(call.dtype));
      return Traffic{call.multimem ? "multimem" : "direct", bytes, 2 * bytes};
    },
    launch,
};

// A copy engine's: word by word, since ranks look at each other's words while they are written.
inline void copy_words(void* to, const void* from, int64_t bytes) {
  auto* target = static_cast<char*>(to);
  const auto* source = static_cast<const char*>(from);
  const bool aligned =
      (reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) % 8 == 0;
  int64_t done = 0;
  for (; aligned && done + 8 <= bytes; done += 8) {
    const uint64_t word =
        __atomic_load_n(reinterpret_cast<const uint64_t*>(source + done), __ATOMIC_ACQUIRE);
    __atomic_store_n(reinterpret_cast<uint64_t*>(target + done), word, __ATOMIC_RELEASE);
  }
  std::memcpy(target + done, source + done, bytes - done);
}

inline Failure allocate(void** memory, int64_t bytes) {
  ++machine().allocations;
  *memory = std::calloc(1, bytes);
  return std::nullopt;
}

inline const Runtime runtime = {
    .device_count = [](int* count) -> Failure {
      *count = 8;
      return std::nullopt;
    },
    .current_device = [](int* current) -> Failure {
      *current = device;
      return std::nullopt;
    },
    .set_device = [](int chosen) -> Failure {
      device = chosen;
      return std::nullopt;
    },
    .versions = [](int* driver, int* library) -> Failure {
      *driver = *library = 13000;
      return std::nullopt;
    },
    .allocate_zeroed = allocate,
    .release = [](void* memory) { std::free(memory); },
    .allocate_pinned = [](void** host, void** on_gpu, int64_t bytes) -> Failure {
      allocate(host, bytes);
      *on_gpu = *host;
      return std::nullopt;
    },
    .release_pinned = [](void* host) { std::free(host); },
    .export_memory = [](void* memory, IpcHandle* handle) -> Failure {
      std::memcpy(handle->bytes, &memory, sizeof memory);
      return std::nullopt;
    },
    .import_memory = [](const IpcHandle& handle, void** memory) -> Failure {
      std::memcpy(memory, handle.bytes, sizeof *memory);
      return std::nullopt;
    },
    .release_import = [](void*) {},
    .can_access_peer = [](int from, int to, bool* can) -> Failure {
      *can = from == to || machine().peers(from, to);
      return std::nullopt;
    },
    .enable_peer_access = [](int) -> Failure { return std::nullopt; },
    .create_stream = [](Stream* stream) -> Failure {
      *stream = new CUstream_st;
      return std::nullopt;
    },
    .release_stream = [](Stream stream) { delete stream; },
    .copy = [](void* to, const void* from, int64_t bytes, Stream stream) -> Failure {
      stream->enqueue([=] { copy_words(to, from, bytes); });
      return std::nullopt;
    },
    .fill_zero = [](void* memory, int64_t bytes, Stream stream) -> Failure {
      stream->enqueue([=] { std::memset(memory, 0, bytes); });
      return std::nullopt;
    },
    .query =
        [](Stream stream, std::string*) {
          ++machine().waits;
          return stream->idle() ? StreamState::kDone : StreamState::kBusy;
        },
    .identify =
        [](int of, uint64_t* host, int64_t* pid) {
          *host = machine().host(of);
          *pid = machine().pid(of);
        },
};

}  // namespace fake
}  // namespace jaxring::cuda
