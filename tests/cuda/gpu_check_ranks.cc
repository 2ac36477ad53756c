// Many ranks on one GPU, in one cooperative launch: values, bits, timeouts, bandwidth. A part of
// gpu_check.py, which builds and reads it. One JSON object a line; --dry-run asks no driver.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cuda/gpu_check_world.h"

namespace jaxring::cuda {
namespace {

bool quick = false;

// Integers in [-4, 4], or (bits) floats whose sums depend on their order.
template <typename T>
std::vector<std::vector<char>> inputs_of(int ranks, int64_t count, bool bits) {
  std::vector<std::vector<char>> inputs(ranks, std::vector<char>(count * sizeof(T)));
  uint32_t state = 12345;
  for (int rank = 0; rank < ranks; ++rank) {
    for (int64_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      const float value = bits ? (static_cast<float>(state) / 4e9f - 0.5f) * 1000.0f
                               : static_cast<float>(static_cast<int>(state >> 16) % 9 - 4);
      const T stored = static_cast<T>(value);
      std::memcpy(inputs[rank].data() + i * sizeof(T), &stored, sizeof(T));
    }
  }
  return inputs;
}

// What each rank should get; sums in rank order, partial ones in the accumulator's type.
template <typename T>
std::vector<std::vector<char>> expected_of(const KernelCall& call,
                                           const std::vector<std::vector<char>>& inputs) {
  const int ranks = static_cast<int>(inputs.size());
  const auto at = [&](int rank, int64_t i) {
    T value;
    std::memcpy(&value, inputs[rank].data() + i * sizeof(T), sizeof(T));
    return value;
  };
  std::vector<T> sums;
  for (int64_t i = 0; i < call.count; ++i) {
    AccumulatorOf<T> sum = static_cast<AccumulatorOf<T>>(at(0, i));
    for (int rank = 1; rank < ranks; ++rank) sum = sum + static_cast<AccumulatorOf<T>>(at(rank, i));
    sums.push_back(static_cast<T>(sum));
  }
  const int64_t part = call.count / ranks * static_cast<int64_t>(sizeof(T));
  const char* bytes = reinterpret_cast<const char*>(sums.data());
  std::vector<std::vector<char>> outputs(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    std::vector<char>& output = outputs[rank];
    switch (call.collective) {
      case Collective::kAllreduce:
        output.assign(bytes, bytes + sums.size() * sizeof(T));
        break;
      case Collective::kReduceScatter:
        output.assign(bytes + rank * part, bytes + (rank + 1) * part);
        break;
      case Collective::kAllGather:
        for (const auto& input : inputs) output.insert(output.end(), input.begin(), input.end());
        break;
      case Collective::kAllToAll:
        for (const auto& input : inputs) {
          output.insert(output.end(), input.begin() + rank * part,
                        input.begin() + (rank + 1) * part);
        }
        break;
      default:
        output = inputs[call.root];
    }
  }
  return outputs;
}

constexpr Collective kCollectives[] = {Collective::kAllreduce, Collective::kReduceScatter,
                                       Collective::kAllGather, Collective::kAllToAll,
                                       Collective::kBroadcast};

template <typename T>
void check_values(World* world, int ranks, bool dry_run) {
  for (Collective collective : kCollectives) {
    for (int64_t count : {1, 7, 4096, 100000}) {
      if (quick && count > 5000) continue;
      KernelCall call;
      call.collective = collective;
      call.dtype = DTypeTraits<T>::dtype;
      call.root = ranks - 1;
      call.count = count * ranks;
      const std::string what = std::string(name_of(collective)) + " " + name_of(call.dtype) + " x" +
                               std::to_string(call.count) + " ranks " + std::to_string(ranks);
      std::string why;
      if (!serves(call, ranks, &why)) {
        say("values", what, false, why);
        continue;
      }
      if (dry_run) continue;
      const auto inputs = inputs_of<T>(ranks, call.count, false);
      const auto expected = expected_of<T>(call, inputs);
      std::vector<std::vector<char>> outputs;
      const std::string error = world->run(call, inputs, expected[0].size(), &outputs);
      say("values", what, error.empty() && outputs == expected, error);
    }
  }
}

template <typename T>
void check_bits(World* world, int ranks) {
  for (int64_t count : {1, 33, 1000, 50000}) {
    KernelCall call;
    call.dtype = DTypeTraits<T>::dtype;
    call.algorithm = Algorithm::kDirect;
    call.count = count;
    const auto inputs = inputs_of<T>(ranks, count, true);
    const auto expected = expected_of<T>(call, inputs);
    for (Method method : {Method::kPackets, Method::kOneShot, Method::kTwoShot}) {
      call.method = method;
      if (!serves(call, ranks, nullptr)) continue;  // packets: small messages only
      std::vector<std::vector<char>> outputs;
      const std::string error = world->run(call, inputs, expected[0].size(), &outputs);
      say("bits",
          "allreduce " + std::string(name_of(call.dtype)) + " x" + std::to_string(count) +
              " method " + std::to_string(static_cast<int>(method)),
          error.empty() && outputs == expected, error);
    }
  }
}

void check_timeout() {
  World world(3, 2, 0.1);  // rank 2 never comes
  KernelCall call;
  call.count = 1000;
  const auto inputs = inputs_of<float>(2, call.count, false);
  std::vector<std::vector<char>> outputs;
  const auto begin = std::chrono::steady_clock::now();
  const std::string error = world.run(call, inputs, call.count * sizeof(float), &outputs);
  const double took_s =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  float first = 0;
  std::memcpy(&first, outputs[0].data(), sizeof first);
  const uint64_t status = world.status(0);
  say("timeout", "a missing rank is named",
      error.empty() && status != 0 && peer_in(status) == 2 && std::isnan(first) && took_s < 5,
      error + "peer " + std::to_string(peer_in(status)) + " after " + std::to_string(took_s) +
          " s");
}

void measure(int ranks) {
  World world(ranks, ranks, 20);
  for (int64_t bytes : {int64_t{4096}, int64_t{1} << 20, int64_t{64} << 20}) {
    KernelCall call;
    call.deterministic = false;
    call.count = bytes / 4;
    const double ours_s = world.seconds(call, 10);
    void *from = nullptr, *to = nullptr;
    need(cudaMalloc(&from, bytes));
    need(cudaMalloc(&to, bytes));
    double copy_s = 1e9;
    for (int repeat = 0; repeat < 10; ++repeat) {
      const auto begin = std::chrono::steady_clock::now();
      need(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, nullptr));
      need(cudaDeviceSynchronize());
      copy_s = std::min(
          copy_s, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
    }
    cudaFree(from);
    cudaFree(to);
    char detail[128];
    std::snprintf(detail, sizeof detail, "%.1f us, %.1f GB/s of each rank's; a copy %.1f us",
                  ours_s * 1e6, bytes / ours_s / 1e9, copy_s * 1e6);
    say("bandwidth", "allreduce " + std::to_string(bytes) + " B ranks " + std::to_string(ranks),
        ours_s > 0, detail);
  }
}

void check(int ranks, bool dry_run) {
  if (dry_run) {
    check_values<float>(nullptr, ranks, true);
    check_values<BFloat16>(nullptr, ranks, true);
    return check_values<int32_t>(nullptr, ranks, true);
  }
  World world(ranks, ranks, 20);
  check_values<float>(&world, ranks, false);
  check_values<BFloat16>(&world, ranks, false);
  check_values<int32_t>(&world, ranks, false);
  check_bits<float>(&world, ranks);
  check_bits<BFloat16>(&world, ranks);
}

}  // namespace
}  // namespace jaxring::cuda

int main(int count, char** arguments) {
  using namespace jaxring::cuda;  // NOLINT
  bool dry_run = false;
  for (int i = 1; i < count; ++i) {
    dry_run = dry_run || std::strcmp(arguments[i], "--dry-run") == 0;
    quick = quick || std::strcmp(arguments[i], "--quick") == 0;
  }
  if (!dry_run) {
    if (auto error = load_all()) {
      say("cuda", "load_all", false, *error);
      return 1;
    }
  }
  for (int ranks : {2, 3, 4, 8}) {
    if (!quick || ranks == 3) check(ranks, dry_run);
  }
  if (dry_run) say("values", "all calls are served", failures == 0);
  if (!dry_run) check_timeout();
  if (!dry_run && !quick) measure(4);
  return failures == 0 ? 0 : 1;
}
