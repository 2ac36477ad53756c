// Whole operations of the engine, from submit to the result, without JAX around them.
//
//   engine_benchmark --benchmark_filter=processes/allreduce
#include <benchmark/benchmark.h>

#include "benchmarks/ranks.h"
#include "xla_ffi/host/round_trip.h"

namespace jaxring::benchmarks {
namespace {

using testing::Layout;

void collective(benchmark::State& state, Layout layout, int world_size, Collective collective) {
  const int64_t bytes = state.range(0);
  Ranks ranks(layout, world_size, collective, bytes);
  const int batch = static_cast<int>(std::clamp<int64_t>((int64_t{1} << 24) / bytes, 4, 1000));
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
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("cache_line_round_trip_ns",
                              std::to_string(cache_line_round_trip_ns()));
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
