// Ranks for benchmarks: a thread each, which are processes to the engine (each maps the segment for
// itself) or devices of one. All run the same number of operations, in batches.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "tests/cpp/world.h"

namespace jaxring::benchmarks {

// One rank's buffers for a call.
struct Buffers {
  std::vector<float> input, output;

  Buffers(Collective collective, int64_t bytes, int world_size) {
    const int64_t count = std::max<int64_t>(1, bytes / sizeof(float));
    const bool cut = collective == Collective::kReduceScatter ||
                     collective == Collective::kAllGather || collective == Collective::kAllToAll;
    const int64_t whole = cut ? (count + world_size - 1) / world_size * world_size : count;
    input.resize(collective == Collective::kAllGather ? whole / world_size : whole, 1.0f);
    output.resize(collective == Collective::kReduceScatter ? whole / world_size : whole);
  }
};

class Ranks {
 public:
  Ranks(testing::Layout layout, int world_size, Collective collective, int64_t bytes)
      : world_(layout, world_size) {
    CallInfo call;
    call.collective = collective;
    info_ = testing::make_info(call, bytes);
    for (int rank = 0; rank < world_size; ++rank) {
      buffers_.emplace_back(collective, bytes, world_size);
    }
    for (int rank = 1; rank < world_size; ++rank) {
      threads_.emplace_back([this, rank] { follow(rank); });
    }
  }

  ~Ranks() {
    operations_.store(-1);
    batch_.fetch_add(1);
    batch_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // `operations` collectives on every rank; returns when rank 0 has done its own.
  void run(int operations) {
    while (running_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
    running_.store(static_cast<int>(threads_.size()), std::memory_order_relaxed);
    operations_.store(operations);
    batch_.fetch_add(1);
    batch_.notify_all();
    run_rank(0, operations);
  }

 private:
  void follow(int rank) {
    for (int seen = 0;;) {
      batch_.wait(seen);
      seen = batch_.load();
      const int operations = operations_.load();
      if (operations < 0) return;
      run_rank(rank, operations);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  void run_rank(int rank, int operations) {
    Buffers& own = buffers_[rank];
    uint64_t& launch = launches_[rank].number;
    const CallInfo& call = *info_;
    const int world_size = world_.world_size();
    for (int i = 0; i < operations; ++i) {
      Request request;
      request.info = info_;
      request.rank = rank;
      request.run_id = ++launch;
      request.input.add(own.input.data(), static_cast<int64_t>(own.input.size()));
      request.output.add(own.output.data(), static_cast<int64_t>(own.output.size()));
      const Range message = request.message();
      request.input.begin_at(input_range(call.collective, message, world_size, rank).offset);
      request.output.begin_at(output_range(call.collective, message, world_size, rank).offset);
      testing::Submitted::start(world_.of_rank(rank), std::move(request)).wait();
    }
  }

  struct alignas(JR_CACHE_LINE) Launch {
    uint64_t number = 0;
  };

  testing::TestWorld world_;
  std::shared_ptr<const CallInfo> info_;
  std::vector<Buffers> buffers_;
  std::vector<Launch> launches_ = std::vector<Launch>(world_.world_size());
  std::atomic<int> batch_{0};
  std::atomic<int> operations_{0};
  std::atomic<int> running_{0};
  std::vector<std::thread> threads_;
};

}  // namespace jaxring::benchmarks
