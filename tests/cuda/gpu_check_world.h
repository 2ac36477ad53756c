// Ranks that share one GPU, for gpu_check_ranks.cc.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "xla_ffi/cuda/kernels.h"

namespace jaxring::cuda {

inline int failures = 0;

inline void say(const char* part, const std::string& what, bool ok,
                const std::string& detail = "") {
  std::printf("{\"part\": \"%s\", \"case\": \"%s\", \"ok\": %s, \"detail\": \"%s\"}\n", part,
              what.c_str(), ok ? "true" : "false", detail.c_str());
  std::fflush(stdout);
  failures += !ok;
}

inline void need(cudaError_t error) {
  if (error == cudaSuccess) return;
  say("cuda", "runtime", false, cudaGetErrorString(error));
  std::exit(1);
}

// Ranks that share the current GPU, each with an arena of its own.
class World {
 public:
  World(int ranks, int launched, double timeout_s) : worlds_(launched) {
    need(cudaHostAlloc(reinterpret_cast<void**>(&words_), 256 * ranks, cudaHostAllocMapped));
    std::memset(words_, 0, 256 * ranks);
    std::vector<char*> arenas(ranks);
    for (char*& arena : arenas) {
      need(cudaMalloc(reinterpret_cast<void**>(&arena), arena_bytes(ranks)));
      need(cudaMemset(arena, 0, arena_bytes(ranks)));
    }
    for (int rank = 0; rank < launched; ++rank) {
      DeviceWorld& world = worlds_[rank];
      world.rank = rank;
      world.world_size = ranks;
      std::copy(arenas.begin(), arenas.end(), world.arenas);
      world.status = words_ + 32 * rank;
      world.stalled = words_ + 32 * rank + 8;
      world.abort = words_ + 32 * rank + 16;
      world.timeout_ns = static_cast<uint64_t>(timeout_s * 1e9);
    }
    arenas_ = arenas;
    need(cudaDeviceSynchronize());
  }
  ~World() {
    for (char* arena : arenas_) cudaFree(arena);
    cudaFreeHost(words_);
  }
  uint64_t status(int rank) const { return words_[32 * rank]; }

  // One call on all ranks; outputs as bytes, or the text of an error.
  std::string run(const KernelCall& call, const std::vector<std::vector<char>>& inputs,
                  size_t output_bytes, std::vector<std::vector<char>>* outputs) {
    const int ranks = static_cast<int>(worlds_.size());
    std::vector<KernelCall> calls(ranks, call);
    std::vector<void*> memory;
    for (int rank = 0; rank < ranks; ++rank) {
      void *in = nullptr, *out = nullptr;
      need(cudaMalloc(&in, std::max<size_t>(inputs[rank].size(), 16)));
      need(cudaMalloc(&out, std::max<size_t>(output_bytes, 16)));
      need(cudaMemcpy(in, inputs[rank].data(), inputs[rank].size(), cudaMemcpyHostToDevice));
      calls[rank].input = in;
      calls[rank].output = out;
      memory.insert(memory.end(), {in, out});
    }
    std::string error = launch_all_ranks(worlds_.data(), calls.data(), ranks, nullptr).value_or("");
    const cudaError_t ended = cudaDeviceSynchronize();
    if (error.empty() && ended != cudaSuccess) error = cudaGetErrorString(ended);
    outputs->assign(ranks, std::vector<char>(output_bytes));
    for (int rank = 0; rank < ranks; ++rank) {
      cudaMemcpy((*outputs)[rank].data(), calls[rank].output, output_bytes, cudaMemcpyDeviceToHost);
    }
    for (void* block : memory) cudaFree(block);
    return error;
  }

  // Seconds of one call, of many.
  double seconds(KernelCall call, int repeats) {
    const int ranks = static_cast<int>(worlds_.size());
    std::vector<KernelCall> calls(ranks, call);
    const size_t bytes = call.count * size_of(call.dtype);
    for (KernelCall& one : calls) {
      void *in = nullptr, *out = nullptr;
      need(cudaMalloc(&in, bytes));
      need(cudaMalloc(&out, bytes));
      need(cudaMemset(in, 0, bytes));
      one.input = in;
      one.output = out;
    }
    double best = 1e9;
    for (int repeat = 0; repeat < repeats; ++repeat) {
      const auto begin = std::chrono::steady_clock::now();
      if (auto error = launch_all_ranks(worlds_.data(), calls.data(), ranks, nullptr)) {
        say("bandwidth", "launch", false, *error);
        return 0;
      }
      need(cudaDeviceSynchronize());
      best = std::min(
          best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    for (KernelCall& one : calls) {
      cudaFree(const_cast<void*>(one.input));
      cudaFree(one.output);
    }
    return best;
  }

 private:
  std::vector<DeviceWorld> worlds_;
  std::vector<char*> arenas_;
  uint64_t* words_ = nullptr;
};

}  // namespace jaxring::cuda
