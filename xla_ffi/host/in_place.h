// Collectives where every rank's input can be read in place: the memory of this process, or
// payloads that came with announcements.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "xla_ffi/algorithms/work.h"
#include "xla_ffi/host/execution.h"

namespace jaxring {

// A part of a collective: elements of one rank's input, or the fold of all ranks' in rank order, go
// to one output or to all.
struct Move {
  static constexpr int kAll = -1;
  static constexpr int kZeros = -2;

  int source;  // a rank, kAll or kZeros
  Range from;
  int output;  // an index into the outputs, or kAll
  int64_t to;  // where in the output
};

// What is to be done for the ranks of this process, whose outputs are in the order of
// `local_ranks`. `senders[r]` is the rank that sends to rank r in a ppermute, -1 for none. What all
// outputs get alike is made once for all of them, or with `for_each_output` once for each: a core
// reads what another has just written four times as fast as it writes where another has just read.
std::vector<Move> moves_of(const Work& work, int world_size, const std::vector<int>& local_ranks,
                           const std::vector<int>& senders, bool for_each_output);

// All of the moves at once, on this thread.
void run_moves(const Arithmetic& arithmetic, const std::vector<Input>& sources,
               const std::vector<Output>& outputs, const std::vector<Move>& moves);

// Inputs are read once and outputs written once; pieces of the moves go to whoever comes for them.
class InPlace final : public Execution {
 public:
  // sources[r] is rank r's input; outputs are those of the ranks in this process; traffic[r] is
  // what is said to have been moved by rank r.
  InPlace(Arithmetic arithmetic, std::vector<Input> sources, std::vector<Output> outputs,
          std::vector<Move> moves, std::shared_ptr<const std::vector<Traffic>> traffic);
  bool work(int worker) override;
  bool finished() const override;
  void retire() override;
  Traffic traffic(int rank) const override { return (*traffic_)[rank]; }

 private:
  // Pieces [next, end) that nobody has taken. Each on its own cache line.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  void run_piece(int64_t index);

  const Arithmetic arithmetic_;
  const std::vector<Input> sources_;
  const std::vector<Output> outputs_;
  const std::vector<Move> moves_;
  const std::shared_ptr<const std::vector<Traffic>> traffic_;
  const int64_t piece_elements_;
  std::vector<int64_t> piece_ends_;  // by move: running totals of their pieces
  int64_t piece_count_ = 0;
  bool streamed_ = false;
  std::vector<Share> shares_;  // one for each output
  std::atomic<int64_t> done_pieces_{0};
  std::atomic<int> workers_{0};
};

}  // namespace jaxring
