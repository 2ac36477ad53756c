#include "xla_ffi/host/execution.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace jaxring {
namespace {

// Small enough that several threads share a message and a piece stays in the L2 cache between the
// fold and the copies of its result; large enough that taking a piece costs nothing.
constexpr int64_t kPieceBytes = 64 * 1024;

}  // namespace

InPlaceDirect::InPlaceDirect(Arithmetic arithmetic, std::vector<Input> sources,
                             std::vector<Output> outputs, bool one_shot)
    : arithmetic_(arithmetic),
      sources_(std::move(sources)),
      outputs_(std::move(outputs)),
      one_shot_(one_shot),
      pieces_(loops_of(Range{0, outputs_[0].count()},
                       kPieceBytes / static_cast<int64_t>(size_of(arithmetic.dtype)))) {}

bool InPlaceDirect::work() {
  bool worked = false;
  workers_.fetch_add(1, std::memory_order_seq_cst);
  for (;;) {
    // seq_cst with retire(): either it sees this worker, or the worker sees no piece left.
    const int64_t piece = next_piece_.fetch_add(1, std::memory_order_seq_cst);
    if (piece >= pieces_.loop_count) break;
    reduce(pieces_[piece]);
    done_pieces_.fetch_add(1, std::memory_order_acq_rel);
    worked = true;
  }
  workers_.fetch_sub(1, std::memory_order_release);
  return worked;
}

bool InPlaceDirect::finished() const {
  return done_pieces_.load(std::memory_order_acquire) == pieces_.loop_count;
}

void InPlaceDirect::retire() {
  next_piece_.store(pieces_.loop_count, std::memory_order_seq_cst);
  while (workers_.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
}

void InPlaceDirect::reduce(Range piece) {
  const int64_t element_bytes = size_of(arithmetic_.dtype);
  std::vector<Operand> operands(sources_.size());
  outputs_[0].for_each_piece(piece, element_bytes, [&](void* first_output, Range part) {
    const Range range{piece.offset + part.offset, part.count};
    for (size_t rank = 0; rank < sources_.size(); ++rank) {
      sources_[rank].for_each_piece(range, element_bytes, [&](const void* data, Range) {
        operands[rank] = Operand{data, false};
      });
    }
    fold(arithmetic_.dtype, arithmetic_.op, operands.data(), static_cast<int>(operands.size()),
         first_output, false, range.count, arithmetic_.divisor);
    for (size_t i = 1; i < outputs_.size(); ++i) {
      outputs_[i].for_each_piece(range, element_bytes, [&](void* output, Range) {
        std::memcpy(output, first_output, range.count * element_bytes);
      });
    }
  });
}

Traffic InPlaceDirect::traffic(int rank) const {
  const int64_t element_bytes = size_of(arithmetic_.dtype);
  const int64_t peers = static_cast<int64_t>(sources_.size()) - 1;
  const Range message{0, outputs_[0].count()};
  const int64_t owned = piece_of(message, peers + 1, rank).count;
  const int64_t elements =
      one_shot_ ? peers * message.count : (message.count - owned) + peers * owned;
  return Traffic{elements * element_bytes, elements * element_bytes};
}

ScheduledExecution::ScheduledExecution(std::vector<Input> inputs, std::vector<Output> outputs)
    : inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

bool ScheduledExecution::work() {
  bool moved = false;
  for (const auto& pipeline : pipelines_) {
    if (pipeline->busy.test_and_set(std::memory_order_acquire)) continue;
    if (!pipeline->finished()) {
      moved |= pipeline->advance();
      if (pipeline->finished()) finished_pipelines_.fetch_add(1, std::memory_order_acq_rel);
    }
    pipeline->busy.clear(std::memory_order_release);
  }
  return moved;
}

bool ScheduledExecution::finished() const {
  return finished_pipelines_.load(std::memory_order_acquire) == static_cast<int>(pipelines_.size());
}

void ScheduledExecution::retire() {
  for (const auto& pipeline : pipelines_) {
    while (pipeline->busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }  // the flags stay set: nobody enters again
}

Traffic ScheduledExecution::traffic(int rank) const {
  Traffic total;
  for (const auto& pipeline : pipelines_) {
    if (pipeline->rank() != rank) continue;
    total.bytes_sent += pipeline->traffic().bytes_sent;
    total.bytes_received += pipeline->traffic().bytes_received;
  }
  return total;
}

std::vector<int> ScheduledExecution::blocking_peers() {
  std::vector<int> peers;
  for (const auto& pipeline : pipelines_) {
    if (pipeline->busy.test_and_set(std::memory_order_acquire)) continue;
    for (int peer : pipeline->blocking_peers()) peers.push_back(peer);
    pipeline->busy.clear(std::memory_order_release);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

}  // namespace jaxring
