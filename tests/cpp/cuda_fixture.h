// Programs on fake GPUs: with XLA's cliques, and without.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/cpp/cuda_program.h"
#include "tests/cpp/fake_switch.h"
#include "xla_ffi/communicator/events.h"
#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/cuda_ffi/seats.h"

namespace jaxring::cuda {

class CudaFfi : public ::testing::Test {
 protected:
  void SetUp() override {
    backend() = {&fake::runtime, &fake::kernels, [](std::string*) { return &fake::nccl; },
                 &fake::multicast};
    fake::nvswitch().supports = [](int) { return false; };
    fake::nvswitch().binds = [](int) { return true; };
    machine().peers = [](int, int) { return true; };
    machine().host = [](int) { return uint64_t{1}; };
    machine().pid = [](int) { return static_cast<int64_t>(getpid()); };
    module_settings().use_cliques = true;
    settings().timeout_s = 20;
    settings().warn_s = 30;
    while (Events::instance().next(0)) continue;
  }

  static std::vector<std::vector<float>> numbers(int ranks, int count) {
    std::vector<std::vector<float>> inputs(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      for (int i = 0; i < count; ++i) inputs[rank].push_back(static_cast<float>(10 * rank + i));
    }
    return inputs;
  }

  static void expect_sums(Program& program, int ranks, int count) {
    const auto inputs = numbers(ranks, count);
    std::vector<std::vector<float>> outputs(ranks, std::vector<float>(count));
    for (const std::string& error : program.run_all(inputs, &outputs)) EXPECT_EQ(error, "");
    std::vector<float> sums(count);
    for (const auto& input : inputs) {
      for (int i = 0; i < count; ++i) sums[i] += input[i];
    }
    for (const auto& output : outputs) EXPECT_EQ(output, sums);
  }
};

// The road of older jaxlibs: the lowering has made the communicator and baked tables.
class WithoutCliques : public CudaFfi {
 protected:
  static Attributes tables(int ranks, int first_id) {
    Attributes attributes = attributes_of(ranks);
    std::vector<int64_t> ids, processes, local_ids;
    for (int rank = 0; rank < ranks; ++rank) {
      ids.push_back(first_id + rank);
      processes.push_back(0);
      local_ids.push_back(rank);
    }
    attributes.numbers("device_ids", ids);
    attributes.numbers("processes", processes);
    attributes.numbers("local_ids", local_ids);
    return attributes;
  }
  static std::string set_up(int ranks, int first_id) {
    std::string key = "mesh:";
    std::vector<int> places;
    for (int rank = 0; rank < ranks; ++rank) {
      key += (rank > 0 ? "," : "") + std::to_string(first_id + rank);
      places.push_back(rank);
    }
    Seats& seats = Seats::instance();
    seats.create(key, places, places, ranks);
    seats.decide(key, seats.map(key, seats.cards(key)));
    return key;
  }
};

}  // namespace jaxring::cuda
