// One collective call as a schedule sees it.
//
// A message is a range of elements that all ranks number alike. Where ranks hold different parts of
// it (reduce_scatter, all_gather, all_to_all) it has one block for each rank, in rank order.
#pragma once

#include <cstdint>

#include "xla_ffi/core/operation.h"
#include "xla_ffi/core/partition.h"

namespace jaxring {

struct Work {
  Collective collective = Collective::kAllreduce;
  Range message;
  int root = 0;          // of a broadcast or reduce
  int destination = -1;  // of a ppermute: the rank that this one sends to, -1 for none
  int source = -1;       // of a ppermute: the rank that sends to this one, -1 for none
};

// A call's block of a rank.
JR_HOST_DEVICE JR_SMALL Range block_of(Range message, int world_size, int rank) {
  const int64_t count = message.count / world_size;
  return Range{message.offset + rank * count, count};
}

// The parts of the message that a rank's operand and result hold.
inline Range input_range(Collective collective, Range message, int world_size, int rank) {
  return collective == Collective::kAllGather ? block_of(message, world_size, rank) : message;
}
inline Range output_range(Collective collective, Range message, int world_size, int rank) {
  return collective == Collective::kReduceScatter ? block_of(message, world_size, rank) : message;
}

// A message of blocks processed in loops, each of which takes a piece of every block.
struct BlockLoops {
  Range message;
  int world_size;
  int64_t loop_count;

  JR_HOST_DEVICE BlockLoops(Range message_, int world_size_, int64_t chunk_elements)
      : message(message_),
        world_size(world_size_),
        loop_count(loops_of(block_of(message_, world_size_, 0), chunk_elements).loop_count) {}
  // The piece of rank's block that loop `index` takes.
  JR_HOST_DEVICE Range piece(int64_t index, int rank) const {
    return piece_of(block_of(message, world_size, rank), loop_count, index);
  }
};

}  // namespace jaxring
