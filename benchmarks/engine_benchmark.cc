// Whole operations of the engine, from submit to the result, without JAX around them.
//
//   engine_benchmark --benchmark_filter=processes/allreduce
#include <benchmark/benchmark.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "benchmarks/ranks.h"
#include "xla_ffi/host/round_trip.h"

namespace jaxring::benchmarks {
namespace {

using testing::Layout;

int batch_of(int64_t bytes) {
  return static_cast<int>(std::clamp<int64_t>((int64_t{1} << 24) / bytes, 4, 1000));
}

void collective(benchmark::State& state, Layout layout, int world_size, Collective collective) {
  const int64_t bytes = state.range(0);
  Ranks ranks(layout, world_size, collective, bytes);
  const int batch = batch_of(bytes);
  ranks.run(8);
  while (state.KeepRunningBatch(batch)) ranks.run(batch);
  state.SetBytesProcessed(state.iterations() * bytes);
}

void add(Layout layout, int world_size, Collective call, int64_t largest) {
  const std::string name = std::string(testing::name_of(layout)) + "/" + name_of(call) +
                           "/ranks:" + std::to_string(world_size);
  benchmark::RegisterBenchmark(
      name.c_str(), [=](benchmark::State& state) { collective(state, layout, world_size, call); })
      ->ArgName("bytes")
      ->UseRealTime()
      ->RangeMultiplier(16)
      ->Range(16, largest);
}

// What two ranks' allreduce costs in copies alone, as neither can read the other's operand: each
// writes its own into memory of both, then adds up its own and the other's. No FIFO, no call; the
// cores meet after each half.
void copies_of_two(benchmark::State& state) {
  const size_t count = state.range(0) / sizeof(float);
  std::vector<float> shared[2];
  for (auto& one : shared) one.assign(count, 0.0f);
  const int batch = batch_of(state.range(0));
  auto run = [&](int self, std::atomic<int>* met) {
    std::vector<float> operand(count, 1.0f), result(count);
    auto meet = [&](int meeting) {
      met[self].store(meeting);
      while (met[1 - self].load() < meeting) std::this_thread::yield();
    };
    for (int i = 0; i < batch; ++i) {
      std::memcpy(shared[self].data(), operand.data(), count * sizeof(float));
      meet(2 * i + 1);
      const float* theirs = shared[1 - self].data();
      for (size_t j = 0; j < count; ++j) result[j] = operand[j] + theirs[j];
      benchmark::DoNotOptimize(result.data());
      meet(2 * i + 2);
    }
  };
  while (state.KeepRunningBatch(batch)) {
    std::atomic<int> met[2] = {};
    std::thread other(run, 1, met);
    run(0, met);
    other.join();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

}  // namespace
}  // namespace jaxring::benchmarks

int main(int argc, char** argv) {
  using namespace jaxring;
  using namespace jaxring::benchmarks;
  constexpr Collective kCalls[] = {Collective::kAllreduce, Collective::kReduceScatter,
                                   Collective::kAllGather, Collective::kAllToAll,
                                   Collective::kBroadcast};
  for (Collective call : kCalls) {
    const int64_t largest = call == Collective::kAllreduce ? 256 << 20 : 16 << 20;
    add(Layout::kProcesses, 2, call, largest);
    add(Layout::kDevices, 2, call, 1 << 20);
  }
  for (int world_size : {4, 8}) {
    add(Layout::kProcesses, world_size, Collective::kAllreduce, 1 << 20);
    add(Layout::kDevices, world_size, Collective::kAllreduce, 1 << 20);
  }
  benchmark::RegisterBenchmark("copies/allreduce/ranks:2", copies_of_two)
      ->ArgName("bytes")
      ->UseRealTime()
      ->RangeMultiplier(16)
      ->Range(64 << 10, 1 << 20);
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("cache_line_round_trip_ns",
                              std::to_string(cache_line_round_trip_ns()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
