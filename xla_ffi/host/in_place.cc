#include "xla_ffi/host/in_place.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "xla_ffi/host/stream.h"

namespace jaxring {
namespace {

// Small enough that several threads share a message and a piece stays in the L2 cache between the
// fold and the copies of its result; large enough that taking a piece costs nothing.
constexpr int64_t kPieceBytes = 64 * 1024;

// The moves of a collective whose result is the same everywhere, into one output or all.
std::vector<Move> moves_of_equal_results(const Work& work, int world_size, int output) {
  const Range message = work.message;
  if (work.collective == Collective::kAllreduce) {
    return {{Move::kAll, message, output, message.offset}};
  }
  if (work.collective == Collective::kBroadcast) {
    return {{work.root, message, output, message.offset}};
  }
  std::vector<Move> moves;
  for (int rank = 0; rank < world_size; ++rank) {
    const Range block = block_of(message, world_size, rank);
    moves.push_back({rank, block, output, block.offset});
  }
  return moves;
}

// The operands of one fold; on the stack unless there are very many.
class Operands {
 public:
  explicit Operands(size_t count) {
    if (count > kMany) many_.resize(count);
  }
  Operand* data() { return many_.empty() ? few_ : many_.data(); }

 private:
  static constexpr size_t kMany = 16;
  Operand few_[kMany];
  std::vector<Operand> many_;
};

// Reads `piece` of the move's sources and writes it to its outputs.
void run_move(const Arithmetic& arithmetic, const std::vector<Input>& sources,
              const std::vector<Output>& outputs, const Move& move, Range piece, bool streamed) {
  const int64_t element_bytes = size_of(arithmetic.dtype);
  const Range target{move.to + piece.offset - move.from.offset, piece.count};
  const size_t first_output = move.output == Move::kAll ? 0 : move.output;
  const size_t end_output = move.output == Move::kAll ? outputs.size() : first_output + 1;
  const int first = move.source == Move::kAll ? 0 : move.source;
  const int count = move.source == Move::kAll ? static_cast<int>(sources.size()) : 1;
  const size_t copies = end_output - first_output - 1;
  Operands operands(count);

  outputs[first_output].for_each_piece(target, element_bytes, [&](void* destination, Range part) {
    if (move.source == Move::kZeros) {
      std::memset(destination, 0, part.count * element_bytes);
      return;
    }
    // Leaves are cut alike on all ranks, so a part of the output is one part of each source.
    const Range range{piece.offset + part.offset, part.count};
    for (int s = 0; s < count; ++s) {
      sources[first + s].for_each_piece(range, element_bytes, [&](const void* data, Range) {
        operands.data()[s] = Operand{data, false};
      });
    }
    fold(arithmetic.dtype, arithmetic.op, operands.data(), count, destination, false, part.count,
         move.source == Move::kAll ? arithmetic.divisor : 1, streamed && copies == 0);
    for (size_t i = first_output + 1; i < end_output; ++i) {
      outputs[i].for_each_piece(
          Range{target.offset + part.offset, part.count}, element_bytes, [&](void* output, Range) {
            copy_bytes(output, destination, part.count * element_bytes, streamed);
          });
    }
  });
}

}  // namespace

void run_moves(const Arithmetic& arithmetic, const std::vector<Input>& sources,
               const std::vector<Output>& outputs, const std::vector<Move>& moves) {
  for (const Move& move : moves) {
    if (move.from.count > 0) run_move(arithmetic, sources, outputs, move, move.from, false);
  }
}

std::vector<Move> moves_of(const Work& work, int world_size, const std::vector<int>& local_ranks,
                           const std::vector<int>& senders, bool for_each_output) {
  const Range message = work.message;
  auto block = [&](int rank) { return block_of(message, world_size, rank); };
  std::vector<Move> moves;
  if (work.collective == Collective::kBarrier) return moves;
  const bool equal = work.collective == Collective::kAllreduce ||
                     work.collective == Collective::kBroadcast ||
                     work.collective == Collective::kAllGather;
  if (equal && !for_each_output) return moves_of_equal_results(work, world_size, Move::kAll);
  for (size_t i = 0; i < local_ranks.size(); ++i) {
    const int rank = local_ranks[i], output = static_cast<int>(i);
    if (equal) {
      for (const Move& move : moves_of_equal_results(work, world_size, output)) {
        moves.push_back(move);
      }
    }
    switch (work.collective) {
      case Collective::kReduceScatter:
        moves.push_back({Move::kAll, block(rank), output, block(rank).offset});
        break;
      case Collective::kAllToAll:
        for (int source = 0; source < world_size; ++source) {
          moves.push_back({source, block(rank), output, block(source).offset});
        }
        break;
      case Collective::kReduce:
        moves.push_back(
            {rank == work.root ? Move::kAll : Move::kZeros, message, output, message.offset});
        break;
      case Collective::kPermute:
        moves.push_back(
            {senders[rank] < 0 ? Move::kZeros : senders[rank], message, output, message.offset});
        break;
      default:
        break;
    }
  }
  return moves;
}

InPlace::InPlace(Arithmetic arithmetic, std::vector<Input> sources, std::vector<Output> outputs,
                 std::vector<Move> moves, std::shared_ptr<const std::vector<Traffic>> traffic)
    : arithmetic_(arithmetic),
      sources_(std::move(sources)),
      outputs_(std::move(outputs)),
      moves_(std::move(moves)),
      traffic_(std::move(traffic)),
      piece_elements_(kPieceBytes / static_cast<int64_t>(size_of(arithmetic.dtype))) {
  int64_t elements = 0;
  for (const Output& output : outputs_) elements += output.count();
  auto is_for_all = [](const Move& move) { return move.source >= 0 && move.output == Move::kAll; };
  const bool gathers = std::all_of(moves_.begin(), moves_.end(), is_for_all);
  streamed_ = is_streamed(elements * size_of(arithmetic.dtype), outputs_.size() > 2 && !gathers);
  piece_ends_.reserve(moves_.size());
  for (const Move& move : moves_) {
    if (move.from.count > 0) piece_count_ += loops_of(move.from, piece_elements_).loop_count;
    piece_ends_.push_back(piece_count_);
  }
  const int64_t share_count = std::clamp<int64_t>(piece_count_, 1, outputs_.size());
  shares_ = std::vector<Share>(share_count);
  for (int64_t i = 0; i < share_count; ++i) {
    const Range share = piece_of(Range{0, piece_count_}, share_count, i);
    shares_[i].next.store(share.offset, std::memory_order_relaxed);
    shares_[i].end = share.offset + share.count;
  }
}

bool InPlace::work(int worker) {
  bool worked = false;
  const size_t first = worker < 0 ? 0 : worker % shares_.size();
  workers_.fetch_add(1, std::memory_order_seq_cst);
  for (size_t i = 0; i < shares_.size(); ++i) {
    Share& share = shares_[(first + i) % shares_.size()];
    // seq_cst with retire(): either it sees this worker, or the worker sees no piece left.
    while (share.next.load(std::memory_order_relaxed) < share.end) {
      const int64_t piece = share.next.fetch_add(1, std::memory_order_seq_cst);
      if (piece >= share.end) break;
      run_piece(piece);
      if (streamed_) stream_fence();
      done_pieces_.fetch_add(1, std::memory_order_acq_rel);
      worked = true;
    }
  }
  workers_.fetch_sub(1, std::memory_order_release);
  return worked;
}

bool InPlace::finished() const {
  return done_pieces_.load(std::memory_order_acquire) == piece_count_;
}

void InPlace::retire() {
  for (Share& share : shares_) share.next.store(share.end, std::memory_order_seq_cst);
  while (workers_.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
}

void InPlace::run_piece(int64_t index) {
  const size_t i =
      std::upper_bound(piece_ends_.begin(), piece_ends_.end(), index) - piece_ends_.begin();
  const Loops pieces = loops_of(moves_[i].from, piece_elements_);
  run_move(arithmetic_, sources_, outputs_, moves_[i],
           pieces[index - (i == 0 ? 0 : piece_ends_[i - 1])], streamed_);
}

}  // namespace jaxring
