// Worlds of ranks for the engine's tests: threads of one process, "processes" that share a segment
// (several communicators in one process that each map it, so that thread sanitizers see every
// access), or both mixed.
#pragma once

#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/communicator/communicator.h"

namespace jaxring::testing {

enum class Layout { kDevices, kProcesses, kTwoDevicesPerProcess };

inline const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::kDevices:
      return "devices";
    case Layout::kProcesses:
      return "processes";
    case Layout::kTwoDevicesPerProcess:
      return "mixed";
  }
  return "?";
}

class TestWorld {
 public:
  TestWorld(Layout layout, int world_size) {
    std::vector<int> processes(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      processes[rank] = layout == Layout::kDevices     ? 0
                        : layout == Layout::kProcesses ? rank
                                                       : rank / 2;
    }
    const int process_count = processes.back() + 1;
    std::shared_ptr<Segment> leader;
    if (process_count > 1) leader = Segment::create(process_count, world_size);
    for (int process = 0; process < process_count; ++process) {
      CommunicatorSpec spec;
      spec.key = "test";
      spec.processes = processes;
      spec.self_process = process;
      communicators_.push_back(std::make_unique<Communicator>(spec));
      if (process_count == 1) continue;
      communicators_.back()->attach(
          process == 0 ? leader : Segment::attach(leader->address(), process_count, world_size));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      by_rank_.push_back(communicators_[processes[rank]].get());
    }
  }

  int world_size() const { return static_cast<int>(by_rank_.size()); }
  Communicator& of_rank(int rank) { return *by_rank_[rank]; }

  // Calls f(rank) on one thread per rank.
  template <class F>
  void spawn(F&& f) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size(); ++rank) threads.emplace_back([&f, rank] { f(rank); });
    for (std::thread& thread : threads) thread.join();
  }

  StatsRow total(bool reset) {
    StatsRow total;
    for (auto& communicator : communicators_) {
      for (const StatsRow& row : communicator->stats(reset)) {
        total.algorithm = row.algorithm;
        total.transport = row.transport;
        total.operations += row.operations;
        total.bytes_sent += row.bytes_sent;
        total.bytes_received += row.bytes_received;
      }
    }
    return total;
  }

 private:
  std::vector<std::unique_ptr<Communicator>> communicators_;
  std::vector<Communicator*> by_rank_;
};

inline std::shared_ptr<const CallInfo> make_info(Algorithm algorithm, ReduceOp op, DType dtype,
                                                 int64_t count, int64_t chunk_bytes = 0) {
  auto info = std::make_shared<CallInfo>();
  info->algorithm = algorithm;
  info->op = op;
  info->dtype = dtype;
  info->chunk_bytes = chunk_bytes;
  info->signature = Signature("allreduce(" + std::string(jaxring::name_of(op)) + ", " +
                              jaxring::name_of(dtype) + "[" + std::to_string(count) + "])");
  return info;
}

// An operation that was submitted and may still be under way.
class Submitted {
 public:
  void wait() {
    if (pending_.valid()) error_ = pending_.get();
  }
  std::optional<Error> error() {
    wait();
    return error_;
  }

  static Submitted start(Communicator& communicator, Request request) {
    Submitted result;
    auto promise = std::make_shared<std::promise<std::optional<Error>>>();
    std::future<std::optional<Error>> future = promise->get_future();
    auto outcome = communicator.submit(std::move(request), [&]() -> Completion {
      return [promise](std::optional<Error> error) { promise->set_value(std::move(error)); };
    });
    if (outcome) {
      result.error_ = *outcome;
    } else {
      result.pending_ = std::move(future);
    }
    return result;
  }

 private:
  std::optional<Error> error_;
  std::future<std::optional<Error>> pending_;
};

}  // namespace jaxring::testing
