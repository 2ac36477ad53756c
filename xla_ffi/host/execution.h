// An operation that has started: every rank has announced it, and its buffers may be touched. Any
// thread may work on it, several at once; it belongs to none.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "xla_ffi/host/executor.h"

namespace jaxring {

class Execution {
 public:
  virtual ~Execution() = default;
  virtual bool work() = 0;  // does what can be done now; true if something was done
  virtual bool finished() const = 0;
  // Returns when no thread touches the operation's buffers and none ever will again.
  virtual void retire() = 0;
  virtual Traffic traffic(int rank) const = 0;
  virtual std::vector<int> blocking_peers() { return {}; }
};

// direct where every rank's input can be read in place: the memory of this process, or payloads
// that came with announcements. Each piece is summed in rank order and written to all outputs here,
// so that inputs are read once and outputs written once; pieces go to whoever comes for them.
class InPlaceDirect final : public Execution {
 public:
  // sources[r] is rank r's input; outputs are those of the ranks in this process. `one_shot`: every
  // rank got every input whole (the payloads); otherwise each piece crossed to its owner and back.
  InPlaceDirect(Arithmetic arithmetic, std::vector<Input> sources, std::vector<Output> outputs,
                bool one_shot);
  bool work() override;
  bool finished() const override;
  void retire() override;
  Traffic traffic(int rank) const override;

 private:
  void reduce(Range piece);

  const Arithmetic arithmetic_;
  const std::vector<Input> sources_;
  const std::vector<Output> outputs_;
  const bool one_shot_;
  const Loops pieces_;
  std::atomic<int64_t> next_piece_{0};
  std::atomic<int64_t> done_pieces_{0};
  std::atomic<int> workers_{0};
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

  bool work() override;
  bool finished() const override;
  void retire() override;
  Traffic traffic(int rank) const override;
  std::vector<int> blocking_peers() override;

 private:
  const std::vector<Input> inputs_;
  const std::vector<Output> outputs_;
  std::vector<std::unique_ptr<Pipeline>> pipelines_;
  std::atomic<int> finished_pipelines_{0};
};

}  // namespace jaxring
