// An operation that has started: every rank has announced it, and its buffers may be touched. Any
// thread may work on it, several at once; it belongs to none.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "xla_ffi/host/executor.h"

namespace jaxring {

class Execution {
 public:
  virtual ~Execution() = default;
  // Does what can be done now; true if something was done. `worker` is the rank that lends its
  // thread, or -1: a worker begins with the same part of each operation, whose memory its core has
  // cached.
  virtual bool work(int worker) = 0;
  virtual bool finished() const = 0;
  // Returns when no thread touches the operation's buffers and none ever will again.
  virtual void retire() = 0;
  virtual Traffic traffic(int rank) const = 0;
  // Of a finished one: when each channel of the rank was through, if it has channels.
  virtual std::vector<std::chrono::steady_clock::time_point> channel_ends(int /*rank*/) const {
    return {};
  }
  virtual std::vector<int> blocking_peers() { return {}; }
};

// A schedule over FIFOs: the pipelines of the ranks in this process.
class ScheduledExecution final : public Execution {
 public:
  ScheduledExecution(std::vector<Input> inputs, std::vector<Output> outputs);
  // Pipelines refer to inputs and outputs by index, so these live here.
  void add(std::unique_ptr<Pipeline> pipeline) {
    if (pipeline->finished()) ++finished_pipelines_;  // an empty message has no steps
    pipelines_.push_back(std::move(pipeline));
  }
  const Input& input(int index) const { return inputs_[index]; }
  const Output& output(int index) const { return outputs_[index]; }

  bool work(int worker) override;
  bool finished() const override;
  void retire() override;
  Traffic traffic(int rank) const override;
  std::vector<std::chrono::steady_clock::time_point> channel_ends(int rank) const override;
  std::vector<int> blocking_peers() override;

 private:
  const std::vector<Input> inputs_;
  const std::vector<Output> outputs_;
  std::vector<std::unique_ptr<Pipeline>> pipelines_;
  std::atomic<int> finished_pipelines_{0};
};

}  // namespace jaxring
