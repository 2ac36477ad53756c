// Advances recorded schedules. Nothing here blocks: a pass does what can be done now.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "xla_ffi/algorithms/registry.h"
#include "xla_ffi/core/fifo.h"
#include "xla_ffi/core/operation.h"
#include "xla_ffi/host/buffers.h"
#include "xla_ffi/host/plan.h"
#include "xla_ffi/host/reduce_kernels.h"

namespace jaxring {

// Finds the ends of FIFOs; the communicator answers from its transports.
class Connections {
 public:
  virtual ~Connections() = default;
  virtual Sender& sender(int from_rank, int to_rank, int channel) = 0;
  virtual Receiver& receiver(int from_rank, int to_rank, int channel) = 0;
  // Called after slices went to (or credit went back to) `rank`, which may be asleep.
  virtual void notify(int rank) = 0;
};

// Bytes that one rank moved in one operation.
struct Traffic {
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
};

// What a fold needs to know about an operation.
struct Arithmetic {
  DType dtype;
  ReduceOp op;
  int64_t divisor;  // of a mean
};

// One rank's share of an operation on one channel.
class Pipeline {
 public:
  Pipeline(int rank, int channel, Arithmetic arithmetic, int64_t slice_elements, const Input* input,
           const Output* output, std::vector<Step> steps, Connections& connections);

  // Moves as many slices as peers allow; true if any moved.
  bool advance();
  bool finished() const { return next_step_ == steps_.size(); }
  const Traffic& traffic() const { return traffic_; }
  int rank() const { return rank_; }
  // The peers whose data or credit the next slice waits for.
  std::vector<int> blocking_peers();

  // Several threads may try to advance one pipeline; one at a time does.
  std::atomic_flag busy = ATOMIC_FLAG_INIT;
  std::chrono::steady_clock::time_point ended;  // set by whoever has seen it finish

 private:
  bool try_slice(const Step& step, Range slice);
  bool gather(const Step& step);
  void* kept_at(const Step& step, int64_t position);
  void* partial_destination(const Step& step, Range slice);
  void keep_sent(Range slice);
  void fold_into(const Step& step, Range slice, Range part, void* destination, bool partial,
                 bool streamed = false);
  void fold_operands(const Step& step, const void* own, Range piece, void* destination,
                     bool partial, bool streamed);

  const int rank_;
  const int channel_;
  const Arithmetic arithmetic_;
  const int64_t slice_elements_;
  bool streamed_;  // the output is large
  const Input* input_;
  const Output* output_;
  std::vector<Step> steps_;
  Connections& connections_;
  size_t next_step_ = 0;
  int64_t done_elements_ = 0;  // of the current step
  std::vector<const void*> received_;
  std::vector<void*> reserved_;
  std::vector<Operand> operands_;
  std::vector<char> kept_;  // partial results between steps, from Step::kept_origin on
  Traffic traffic_;
};

}  // namespace jaxring
