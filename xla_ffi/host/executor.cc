#include "xla_ffi/host/executor.h"

#include <algorithm>
#include <cstring>

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
      connections_(connections) {}

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
  const int64_t sent_bytes = slice.count * (step.write_output ? final_bytes : partial_bytes);
  const int64_t received_bytes = slice.count * (step.use_input ? partial_bytes : final_bytes);

  fold_into(step, slice, step.write_output ? nullptr : reserved_[0]);
  for (int i = 0; i < step.to.count(); ++i) {
    if (step.write_output) {
      output_->for_each_piece(slice, final_bytes, [&](const void* piece, Range range) {
        std::memcpy(at(reserved_[i], range.offset, final_bytes), piece, range.count * final_bytes);
      });
    } else if (i > 0) {
      std::memcpy(reserved_[i], reserved_[0], sent_bytes);
    }
    connections_.sender(rank_, step.to[i], channel_).publish();
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

// The generic step: operands in rank order -> the output's pieces, or one partial slot.
void Pipeline::fold_into(const Step& step, Range slice, void* partial_destination) {
  const int64_t final_bytes = size_of(arithmetic_.dtype);
  const int64_t received_bytes =
      step.use_input ? accumulator_size_of(arithmetic_.dtype) : size_of(arithmetic_.dtype);
  const bool reduces = step.use_input && step.from.count() > 0;

  auto fold_piece = [&](const void* own, void* destination, Range piece) {
    operands_.clear();
    for (int i = 0; i < step.from.count(); ++i) {
      if (own != nullptr && step.from[i] > rank_) {
        operands_.push_back(Operand{own, false});
        own = nullptr;
      }
      operands_.push_back(Operand{at(received_[i], piece.offset, received_bytes), reduces});
    }
    if (own != nullptr) operands_.push_back(Operand{own, false});
    // A message that only travels is copied, never divided.
    fold(arithmetic_.dtype, arithmetic_.op, operands_.data(), static_cast<int>(operands_.size()),
         destination, partial_destination != nullptr, piece.count,
         reduces ? arithmetic_.divisor : 1);
  };

  if (partial_destination != nullptr) {
    input_->for_each_piece(slice, final_bytes, [&](const void* own, Range piece) {
      fold_piece(own, at(partial_destination, piece.offset, accumulator_size_of(arithmetic_.dtype)),
                 piece);
    });
  } else {
    output_->for_each_piece(slice, final_bytes, [&](void* destination, Range piece) {
      if (!step.use_input) return fold_piece(nullptr, destination, piece);
      // Input and output have the same leaves, so the output's piece is one piece of the input too.
      input_->for_each_piece(Range{slice.offset + piece.offset, piece.count}, final_bytes,
                             [&](const void* own, Range) { fold_piece(own, destination, piece); });
    });
  }
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
