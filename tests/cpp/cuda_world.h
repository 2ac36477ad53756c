// A world of emulated GPUs: every rank runs a sequence of calls on its own "stream", as blocks of
// host threads. Between ranks there is nothing but the arenas, as on GPUs.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "block_shim.h"
#include "cuda_mutated.h"
#include "xla_ffi/cuda/plan.h"
#include "xla_ffi/cuda/run_call.cuh"

namespace jaxring::testing {

// Small, so that short messages take several chunks and go round the FIFOs.
inline cuda::ArenaShape small_shape(int blocks) {
  return cuda::ArenaShape{blocks, blocks, blocks, 16, 512, 128, 4, 32, 32};
}

// Of a rank that is late: long enough for its peers to be as far ahead as the protocol allows.
constexpr int kDelayMs = 50;

// A call on all ranks, with its memory.
struct EmulatedCall {
  cuda::KernelCall call;                   // but for the pointers
  std::vector<std::vector<char>> inputs;   // by rank
  std::vector<std::vector<char>> outputs;  // by rank; empty: in place
  int offset_bytes = 0;                    // from alignment, of all inputs and outputs
  int64_t own_block_bytes = 0;  // of an all_gather whose input is its own block of the output
  int slow_reader = -1;         // has sent its packets long before it looks for those of others
  int late_rank = -1;           // begins some milliseconds after the others
  std::vector<cuda::RankCall> rank_calls{};  // filled in by the world

  char* input(int rank) {
    if (own_block_bytes > 0) return output(rank) + rank * own_block_bytes;
    return aligned(inputs[rank]) + offset_bytes;
  }
  char* output(int rank) {
    return outputs.empty() ? input(rank) : aligned(outputs[rank]) + offset_bytes;
  }
  // What a vector needs to hold so many bytes at the offset.
  static size_t room(int64_t bytes) { return bytes + 64; }

 private:
  static char* aligned(std::vector<char>& memory) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (-address & 15);
  }
};

class EmulatedWorld {
 public:
  EmulatedWorld(int world_size, int blocks, int threads)
      : world_size_(world_size),
        blocks_(blocks),
        threads_(threads),
        shape_(small_shape(blocks)),
        layout_(cuda::layout_of(shape_, world_size)),
        statuses(world_size),
        stalls(world_size) {
    const int64_t window_bytes = cuda::window_bytes_of(shape_);
    multicast_.bytes = window_bytes;
    multicast_.base = allocate(window_bytes);  // no more than addresses
    for (int rank = 0; rank < world_size; ++rank) {
      arenas_.push_back(allocate_zeroed(layout_.bytes));
      multicast_.windows.push_back(allocate(window_bytes));
    }
  }

  uint64_t abort = 0;
  uint64_t warn_ns = 0;
  uint64_t timeout_ns = kMutated ? 5'000'000'000 : 60'000'000'000;

  bool serves(const cuda::KernelCall& call) const {
    return !cuda::refusal_of(limited(call), world_size_, shape_);
  }

  // All ranks but `absent` run all calls, each in its own time.
  template <class Types>
  void run(std::deque<EmulatedCall>& calls, int absent = -1) {
    for (EmulatedCall& call : calls) prepare(call);
    std::vector<std::thread> threads;
    std::deque<Stream> streams;
    for (int rank = 0; rank < world_size_; ++rank) {
      if (rank == absent) continue;
      Stream& stream = streams.emplace_back(blocks_, threads_);
      for (int block = 0; block < blocks_; ++block) {
        for (int thread = 0; thread < threads_; ++thread) {
          threads.emplace_back([this, &calls, &stream, rank, block, thread] {
            for (EmulatedCall& call : calls) {
              if (call.late_rank == rank)
                std::this_thread::sleep_for(std::chrono::milliseconds(kDelayMs));
              run_thread<Types>(stream, call, rank, block, thread);
              stream.kernel_end.arrive_and_wait();
            }
          });
        }
      }
    }
    for (std::thread& thread : threads) thread.join();
  }

  template <class Types>
  void run(EmulatedCall& call, int absent = -1) {
    std::deque<EmulatedCall> calls;
    calls.push_back(std::move(call));
    run<Types>(calls, absent);
    call = std::move(calls.front());
  }

  cuda::Arena arena(int rank) { return cuda::Arena(arenas_[rank], layout_); }

 private:
  // A rank's threads. A kernel begins when the one before it on the stream has ended.
  struct Stream {
    Stream(int blocks, int threads) : kernel_end(blocks * threads), shared(blocks) {
      for (int block = 0; block < blocks; ++block) teams.emplace_back(threads);
    }
    std::barrier<> kernel_end;
    std::deque<ShimTeam> teams;
    std::vector<cuda::BlockShared> shared;
  };

  template <class Types>
  void run_thread(Stream& stream, const EmulatedCall& emulated, int rank, int block, int thread) {
    const cuda::RankCall& call = emulated.rank_calls[rank];
    if (block >= call.plan.blocks()) return;
    ShimBlock shim(block, thread, threads_, stream.teams[block], multicast_);
    if (emulated.slow_reader == rank) shim.delay_packets(kDelayMs);
    if (call.plan.road == cuda::Road::kMultimem) {
      cuda::run_call<ShimBlock, cuda::MultimemTypes>(shim, stream.shared[block], call);
    } else if (jaxring::reduces(call.plan.collective)) {
      cuda::run_call<ShimBlock, Types>(shim, stream.shared[block], call);
    } else {
      cuda::run_call<ShimBlock, cuda::DTypeList<>>(shim, stream.shared[block], call);
    }
  }

  char* allocate(int64_t bytes) {
    char* memory = static_cast<char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
    memory_.emplace_back(memory, &std::free);
    return memory;
  }
  char* allocate_zeroed(int64_t bytes) {
    return static_cast<char*>(std::memset(allocate(bytes), 0, bytes));
  }

  cuda::KernelCall limited(cuda::KernelCall call) const {
    call.max_blocks = blocks_;
    return call;
  }

  void prepare(EmulatedCall& call) {
    const cuda::Plan plan = cuda::plan_of(limited(call.call), world_size_, shape_);
    call.rank_calls.clear();
    for (int rank = 0; rank < world_size_; ++rank) {
      cuda::DeviceWorld world;
      world.rank = rank;
      world.world_size = world_size_;
      for (int r = 0; r < world_size_; ++r) world.arenas[r] = arenas_[r];
      world.window = multicast_.windows[rank];
      world.multicast = multicast_.base;
      world.status = &statuses[rank];
      world.stalled = &stalls[rank];
      world.warn_ns = warn_ns;
      world.abort = &abort;
      world.timeout_ns = timeout_ns;
      cuda::KernelCall mine = limited(call.call);
      mine.input = call.input(rank);
      mine.output = call.output(rank);
      call.rank_calls.push_back(cuda::rank_call(world, mine, plan));
    }
  }

  const int world_size_;
  const int blocks_;
  const int threads_;
  const cuda::ArenaShape shape_;
  const cuda::ArenaLayout layout_;
  std::deque<std::unique_ptr<char, void (*)(void*)>> memory_;
  std::vector<char*> arenas_;
  ShimMulticast multicast_;

 public:
  std::vector<uint64_t> statuses, stalls;  // by rank
};

}  // namespace jaxring::testing
