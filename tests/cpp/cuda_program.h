// One program of one call on several fake GPUs, driven through all stages as XLA drives it.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/fake_gpu.h"
#include "tests/cpp/fake_nccl.h"
#include "tests/cpp/fake_xla.h"
#include "xla_ffi/cuda_ffi/call_site.h"
#include "xla_ffi/cuda_ffi/handlers.h"

namespace jaxring::cuda {

using fake_xla::Attributes;
using fake_xla::Buffer;

inline Attributes attributes_of(int ranks) {
  Attributes attributes;
  for (const char* name : {"communicator", "name", "layout"}) attributes.text(name, "");
  attributes.text("collective", "allreduce");
  attributes.text("op", "sum");
  attributes.text("algorithm", "auto");
  attributes.text("module", "jit_f#0");
  attributes.text("shapes", "float32[7]");
  attributes.number("root", 0);
  attributes.number("call", 0);
  attributes.number("chunk_bytes", 0);
  attributes.flag("deterministic", false);
  attributes.flag("ordered", true);
  std::vector<int64_t> members;
  for (int rank = 0; rank < ranks; ++rank) members.push_back(rank);
  attributes.numbers("group_members", members);
  attributes.numbers("group_sizes", {ranks});
  for (const char* name : {"permutation", "device_ids", "processes", "local_ids"}) {
    attributes.numbers(name, {});
  }
  return attributes;
}

// One program of one call on several GPUs of this process; each is driven by a thread, as in XLA.
class Program {
 public:
  Program(int ranks, Attributes attributes, bool has_cliques = true, int32_t minor = 2)
      : api_(has_cliques), ranks_(ranks), attributes_(ranks, attributes) {
    auto clique = std::make_shared<fake::Meeting>(ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      kept_comms().push_back(std::make_unique<ncclComm>(ncclComm{clique, rank}));
      collectives_.push_back(std::make_unique<fake_xla::Collectives>(minor));
      collectives_.back()->communicator = kept_comms().back().get();
      streams_.push_back(std::make_unique<CUstream_st>());
    }
  }
  ~Program() { delete static_cast<CallSite*>(state_); }

  Attributes& attributes(int rank) { return attributes_[rank]; }
  fake_xla::Collectives& collectives(int rank) { return *collectives_[rank]; }

  std::string instantiate() {
    XLA_FFI_ExecutionContext context;
    const std::string error = fake_xla::call(jaxring_cuda_instantiate, api_, &context,
                                             XLA_FFI_ExecutionStage_INSTANTIATE, attributes_[0]);
    state_ = context.state;
    return error;
  }

  // One rank's execution: errors of the three stages, the first that there is.
  std::string run(int rank, const std::vector<float>& input, std::vector<float>* output) {
    fake::device = rank;
    XLA_FFI_ExecutionContext context{state_of(rank), streams_[rank].get(), rank,
                                     &collectives_[rank]->extension};
    std::string error = fake_xla::call(jaxring_cuda_prepare, api_, &context,
                                       XLA_FFI_ExecutionStage_PREPARE, attributes_[rank]);
    if (!error.empty()) return error;
    int32_t order = 0;
    const Buffer in{XLA_FFI_DataType_F32,
                    const_cast<float*>(input.data()),
                    {static_cast<int64_t>(input.size())}};
    const Buffer out{XLA_FFI_DataType_F32, output->data(), {static_cast<int64_t>(output->size())}};
    const Buffer token{XLA_FFI_DataType_S32, &order, {}};
    error =
        fake_xla::call(jaxring_cuda_initialize, api_, &context, XLA_FFI_ExecutionStage_INITIALIZE,
                       attributes_[rank], {in}, {token, out});
    if (!error.empty()) return error;
    const int allocated = machine().allocations, waited = machine().waits;
    error = fake_xla::call(jaxring_cuda_execute, api_, &context, XLA_FFI_ExecutionStage_EXECUTE,
                           attributes_[rank], {token, in}, {token, out});
    // Other ranks may be in Initialize meanwhile, but only in a first run.
    if (runs_ > 0) {
      EXPECT_EQ(allocated, machine().allocations);
      EXPECT_EQ(waited, machine().waits);
    }
    streams_[rank]->wait();
    return error;
  }

  // All ranks at once: their errors; outputs[r] as they come.
  std::vector<std::string> run_all(const std::vector<std::vector<float>>& inputs,
                                   std::vector<std::vector<float>>* outputs) {
    std::vector<std::string> errors(ranks_);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks_; ++rank) {
      threads.emplace_back(
          [&, rank] { errors[rank] = run(rank, inputs[rank], &(*outputs)[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
    ++runs_;
    return errors;
  }

  // The next run sets communicators up again.
  void expect_set_up() { runs_ = 0; }

  // Another rank runs another program.
  void give_own_site(int rank) {
    XLA_FFI_ExecutionContext context;
    fake_xla::call(jaxring_cuda_instantiate, api_, &context, XLA_FFI_ExecutionStage_INSTANTIATE,
                   attributes_[rank]);
    own_sites_[rank].reset(static_cast<CallSite*>(context.state));
  }

 private:
  // XLA keeps its cliques for the life of the process; Seats knows them by their addresses, so none
  // may be used twice.
  static std::vector<std::unique_ptr<ncclComm>>& kept_comms() {
    static std::vector<std::unique_ptr<ncclComm>> comms;
    return comms;
  }
  void* state_of(int rank) { return own_sites_.count(rank) != 0 ? own_sites_[rank].get() : state_; }

  fake_xla::Api api_;
  const int ranks_;
  std::vector<Attributes> attributes_;
  std::vector<std::unique_ptr<fake_xla::Collectives>> collectives_;
  std::vector<std::unique_ptr<CUstream_st>> streams_;
  std::map<int, std::unique_ptr<CallSite>> own_sites_;
  void* state_ = nullptr;
  int runs_ = 0;
};

}  // namespace jaxring::cuda
