// Worlds of ranks for the engine's tests: threads of one process, "processes" that share a segment
// (several communicators in one process that each map it, so that thread sanitizers see every
// access), both mixed, or "hosts" of two such processes with links over loopback between them.
#pragma once

#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "xla_ffi/communicator/communicator.h"

namespace jaxring::testing {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

enum class Layout { kDevices, kProcesses, kTwoDevicesPerProcess, kHosts };

// Those that this build can make.
inline std::vector<Layout> layouts_of_processes() {
  std::vector<Layout> layouts = {Layout::kProcesses, Layout::kTwoDevicesPerProcess};
  // libfabric itself is not instrumented: what it does would be reported as ours.
  if (JAXRING_HAS_LIBFABRIC && !kSanitized) layouts.push_back(Layout::kHosts);
  return layouts;
}
inline std::vector<Layout> all_layouts() {
  std::vector<Layout> layouts = layouts_of_processes();
  layouts.insert(layouts.begin(), Layout::kDevices);
  return layouts;
}

inline const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::kDevices:
      return "devices";
    case Layout::kProcesses:
      return "processes";
    case Layout::kTwoDevicesPerProcess:
      return "mixed";
    case Layout::kHosts:
      return "hosts";
  }
  return "?";
}

class TestWorld {
 public:
  // `hosts`: by rank; of other layouts than kHosts, what the communicators are told.
  TestWorld(Layout layout, int world_size, std::vector<int> hosts = {}) {
    std::vector<int> processes(world_size);
    for (int rank = 0; rank < world_size; ++rank) {
      processes[rank] = layout == Layout::kDevices                ? 0
                        : layout == Layout::kTwoDevicesPerProcess ? rank / 2
                                                                  : rank;
    }
    const int process_count = processes.back() + 1;
    std::map<int, std::shared_ptr<Segment>> segments;  // by host
    std::vector<std::string> addresses;
    for (int rank = static_cast<int>(hosts.size()); rank < world_size; ++rank) {
      hosts.push_back(layout == Layout::kHosts ? rank / 2 : 0);
    }
    const bool linked = layout == Layout::kHosts && hosts.front() != hosts.back();
    for (int process = 0; process < process_count; ++process) {
      CommunicatorSpec spec;
      spec.key = "test";
      spec.processes = processes;
      spec.self_process = process;
      communicators_.push_back(std::make_unique<Communicator>(spec));
      communicators_.back()->set_hosts(hosts);
      if (process_count == 1) continue;
      if (linked) {
        addresses.push_back(
            communicators_.back()->listen(hosts, "tcp", "127.0.0.1", "a secret of this test"));
      }
      auto& segment = segments[linked ? hosts[process] : 0];
      const bool leads = segment == nullptr;
      if (leads) segment = Segment::create(process_count, world_size);
      communicators_.back()->attach(
          leads ? segment : Segment::attach(segment->address(), process_count, world_size));
    }
    for (auto& communicator : communicators_) {
      if (linked) communicator->connect(addresses);
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

// A call of any collective, with the signature that Python would give it, more or less.
inline std::shared_ptr<const CallInfo> make_info(const CallInfo& call, int64_t count) {
  auto info = std::make_shared<CallInfo>(call);
  info->signature =
      Signature(std::string(jaxring::name_of(call.collective)) + "(" + std::to_string(call.root) +
                ", " + jaxring::name_of(call.dtype) + "[" + std::to_string(count) + "])");
  return info;
}

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
    std::future<std::optional<Error>> future;
    auto outcome = communicator.submit(std::move(request), [&]() -> Completion {
      auto promise = std::make_shared<std::promise<std::optional<Error>>>();
      future = promise->get_future();
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

// One operation, and what every rank should get. Several run in a row on the same threads: making a
// thread for each rank costs more than a small operation.
class Check {
 public:
  virtual ~Check() = default;
  virtual void run(TestWorld& world, int rank) = 0;
  virtual void verify() const = 0;
};

using Checks = std::vector<std::unique_ptr<Check>>;

inline void run_all(TestWorld& world, const Checks& checks) {
  world.spawn([&](int rank) {
    for (const auto& check : checks) check->run(world, rank);
  });
  for (const auto& check : checks) check->verify();
}

}  // namespace jaxring::testing
