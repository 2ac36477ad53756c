#include "xla_ffi/host/executor.h"

#include <algorithm>
#include <cstring>

#include "xla_ffi/host/stream.h"

namespace jaxring {
namespace {

const char* at(const void* base, int64_t elements, int64_t element_bytes) {
  return static_cast<const char*>(base) + elements * element_bytes;
}

char* at(void* base, int64_t elements, int64_t element_bytes) {
  return static_cast<char*>(base) + elements * element_bytes;
}

}  // namespace

Pipeline::Pipeline(int rank, int channel, Arithmetic arithmetic, int64_t slice_elements,
                   const Input* input, const Output* output, std::vector<Step> steps,
                   Connections& connections)
    : rank_(rank),
      channel_(channel),
      arithmetic_(arithmetic),
      slice_elements_(slice_elements),
      input_(input),
      output_(output),
      steps_(std::move(steps)),
      connections_(connections) {
  int64_t kept_elements = 0;
  for (const Step& step : steps_) {
    if (step.into != Into::kKept) continue;
    kept_elements =
        std::max(kept_elements, step.range.offset + step.range.count - step.kept_origin);
  }
  // Over an operand that has just been read, so that its lines lie in the caches, streaming takes
  // twice the time.
  const bool over_operand = input_->first() == output_->first();
  streamed_ = !over_operand && is_streamed(output_->count() * size_of(arithmetic_.dtype), false);
  kept_.resize(kept_elements * accumulator_size_of(arithmetic_.dtype));
}

bool Pipeline::advance() {
  bool moved = false;
  while (!finished()) {
    const Step& step = steps_[next_step_];
    const int64_t count = std::min(slice_elements_, step.range.count - done_elements_);
    if (!try_slice(step, Range{step.range.offset + done_elements_, count})) break;
    moved = true;
    done_elements_ += count;
    if (done_elements_ == step.range.count) {
      done_elements_ = 0;
      ++next_step_;
    }
  }
  if (moved && streamed_) stream_fence();
  return moved;
}

// Collects a full slot from every source and a free one to every destination, or gives up for now.
bool Pipeline::gather(const Step& step) {
  received_.clear();
  reserved_.clear();
  for (int i = 0; i < step.from.count(); ++i) {
    const void* slot = connections_.receiver(step.from[i], rank_, channel_).try_peek();
    if (slot == nullptr) return false;
    received_.push_back(slot);
  }
  for (int i = 0; i < step.to.count(); ++i) {
    void* slot = connections_.sender(rank_, step.to[i], channel_).try_reserve();
    if (slot == nullptr) return false;
    reserved_.push_back(slot);
  }
  return true;
}

bool Pipeline::try_slice(const Step& step, Range slice) {
  if (!gather(step)) return false;
  const int64_t final_bytes = size_of(arithmetic_.dtype);
  const int64_t partial_bytes = accumulator_size_of(arithmetic_.dtype);
  const int64_t sent_bytes = slice.count * (is_final(step.into) ? final_bytes : partial_bytes);
  const int64_t received_bytes =
      slice.count * (receives_partial(step.own) ? partial_bytes : final_bytes);

  if (step.into == Into::kOutput && step.to.count() > 0) {
    fold_into(step, slice, Range{0, slice.count}, reserved_[0], false);
    keep_sent(slice);
  } else if (step.into == Into::kOutput) {
    output_->for_each_piece(slice, final_bytes, [&](void* destination, Range piece) {
      fold_into(step, slice, piece, destination, false, streamed_);
    });
  } else if (step.into == Into::kFinalPeers) {
    fold_into(step, slice, Range{0, slice.count}, reserved_[0], false);
  } else {
    fold_into(step, slice, Range{0, slice.count}, partial_destination(step, slice), true);
  }
  for (int i = 1; i < step.to.count(); ++i) std::memcpy(reserved_[i], reserved_[0], sent_bytes);
  for (int i = 0; i < step.to.count(); ++i) {
    connections_.sender(rank_, step.to[i], channel_).publish(sent_bytes);
    connections_.notify(step.to[i]);
  }
  for (int i = 0; i < step.from.count(); ++i) {
    connections_.receiver(step.from[i], rank_, channel_).release();
    connections_.notify(step.from[i]);
  }
  traffic_.bytes_sent += step.to.count() * sent_bytes;
  traffic_.bytes_received += step.from.count() * received_bytes;
  return true;
}

void* Pipeline::kept_at(const Step& step, int64_t position) {
  return at(kept_.data(), position - step.kept_origin, accumulator_size_of(arithmetic_.dtype));
}

void* Pipeline::partial_destination(const Step& step, Range slice) {
  return step.into == Into::kKept ? kept_at(step, slice.offset) : reserved_[0];
}

// What goes to peers and to the output: made in the first peer's slot, because reading it back from
// a streamed output would fetch it from memory.
void Pipeline::keep_sent(Range slice) {
  const int64_t element_bytes = size_of(arithmetic_.dtype);
  output_->for_each_piece(slice, element_bytes, [&](void* data, Range piece) {
    copy_bytes(data, at(reserved_[0], piece.offset, element_bytes), piece.count * element_bytes,
               streamed_);
  });
}

// The generic step for `part` of the slice: operands in rank order -> destination.
void Pipeline::fold_into(const Step& step, Range slice, Range part, void* destination, bool partial,
                         bool streamed) {
  const int64_t final_bytes = size_of(arithmetic_.dtype);
  const int64_t bytes = partial ? accumulator_size_of(arithmetic_.dtype) : final_bytes;
  const Range range{slice.offset + part.offset, part.count};
  auto fold_piece = [&](const void* own, Range piece) {
    fold_operands(step, own, Range{part.offset + piece.offset, piece.count},
                  at(destination, piece.offset, bytes), partial, streamed);
  };
  switch (step.own) {
    case Own::kInput:
    case Own::kInputs:
      return input_->for_each_piece(range, final_bytes, fold_piece);
    case Own::kOutput:
      return output_->for_each_piece(range, final_bytes, fold_piece);
    case Own::kKept:
      return fold_piece(kept_at(step, range.offset), Range{0, part.count});
    case Own::kNothing:
      if (step.from.count() == 0) {
        std::memset(destination, 0, part.count * bytes);
        return;
      }
      return fold_piece(nullptr, Range{0, part.count});
  }
}

// `piece` counts from the slice's beginning.
void Pipeline::fold_operands(const Step& step, const void* own, Range piece, void* destination,
                             bool partial, bool streamed) {
  const bool received_partial = receives_partial(step.own);
  const int64_t received_bytes =
      received_partial ? accumulator_size_of(arithmetic_.dtype) : size_of(arithmetic_.dtype);
  operands_.clear();
  for (int i = 0; i < step.from.count(); ++i) {
    if (own != nullptr && step.from[i] > rank_) {
      operands_.push_back(Operand{own, step.own == Own::kKept});
      own = nullptr;
    }
    operands_.push_back(Operand{at(received_[i], piece.offset, received_bytes), received_partial});
  }
  if (own != nullptr) operands_.push_back(Operand{own, step.own == Own::kKept});
  // A message that only travels is copied, never divided.
  const bool reduces = step.own != Own::kNothing && step.from.count() > 0;
  fold(arithmetic_.dtype, arithmetic_.op, operands_.data(), static_cast<int>(operands_.size()),
       destination, partial, piece.count, reduces ? arithmetic_.divisor : 1, streamed);
}

std::vector<int> Pipeline::blocking_peers() {
  std::vector<int> peers;
  if (finished()) return peers;
  const Step& step = steps_[next_step_];
  for (int i = 0; i < step.from.count(); ++i) {
    if (connections_.receiver(step.from[i], rank_, channel_).try_peek() == nullptr) {
      peers.push_back(step.from[i]);
    }
  }
  for (int i = 0; i < step.to.count(); ++i) {
    if (connections_.sender(rank_, step.to[i], channel_).try_reserve() == nullptr) {
      peers.push_back(step.to[i]);
    }
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

}  // namespace jaxring
