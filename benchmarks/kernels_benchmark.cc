// The reduction kernels: fold() of two and more operands, by dtype. Bytes are those of all operands
// and the result.
#include <benchmark/benchmark.h>

#include <string>
#include <vector>

#include "xla_ffi/host/reduce_kernels.h"

namespace jaxring {
namespace {

void fold_sum(benchmark::State& state, DType dtype) {
  const int64_t bytes = state.range(0);
  const int operand_count = static_cast<int>(state.range(1));
  const int64_t count = bytes / static_cast<int64_t>(size_of(dtype));
  std::vector<std::vector<char>> sources(operand_count, std::vector<char>(bytes, 0));
  std::vector<char> result(bytes);
  std::vector<Operand> operands;
  for (const auto& source : sources) operands.push_back(Operand{source.data(), false});
  for (auto _ : state) {
    fold(dtype, ReduceOp::kSum, operands.data(), operand_count, result.data(), false, count, 1);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * bytes * (operand_count + 1));
}

}  // namespace
}  // namespace jaxring

int main(int argc, char** argv) {
  using namespace jaxring;
  for (DType dtype : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16,
                      DType::kInt32, DType::kInt8}) {
    benchmark::RegisterBenchmark((std::string("sum/") + name_of(dtype)).c_str(),
                                 [=](benchmark::State& state) { fold_sum(state, dtype); })
        ->ArgNames({"bytes", "operands"})
        ->ArgsProduct({{64, 16 << 10, 256 << 10, 16 << 20}, {2, 4}});
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
