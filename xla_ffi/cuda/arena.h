// What lies where in a rank's arena. A kernel's blocks are independent channels: each has its own
// flags, epochs, staging and FIFOs, and talks only to the blocks of its index on other ranks.
//
//   log                              of calls, for the host
//   state      [block]               epochs; the arena's owner alone uses them
//   table                            calls of many ranks on one GPU
//   steps      [block][peer][2]      FIFO positions; likewise
//   flags      [block][peer]         arrivals of the peer's block, written by the peer
//   counters   [block][peer]         FIFO from the peer: produced (by it); to it: consumed (by it)
//   operands   [block][parity]       what this rank has staged, read by peers
//   sums       [block][parity]       two-shot: the sums of this rank's piece, read by peers
//   kept       [block]               partial sums of schedules that keep some
//   packets    [block][parity][peer] written by the peer
//   slots      [block][peer]         FIFO from the peer, written by it
//
// What a rank waits for lies in its own arena, so that polling never crosses a link.
#pragma once

#include <cstdint>

#include "xla_ffi/cuda/kernels.h"
#include "xla_ffi/cuda/pack.h"

namespace jaxring::cuda {

// Sizes, the same on all ranks. Those of a GPU are below; the emulation's are small.
struct ArenaShape {
  int blocks;            // with flags and staging
  int fifo_blocks;       // with FIFOs
  int packet_blocks;     // with packets
  int packet_packs;      // 16-byte payloads of one block's packets, from and to each peer
  int64_t staged_bytes;  // of operands, per block and parity
  int64_t slot_bytes;
  int slot_count;
  int64_t part_bytes;  // a message larger than so many is shared among blocks;
  int64_t hop_bytes;   // on a schedule, one larger than so many per rank
};

// A block moves some 20 GB/s, so that 32 fill NVLink; all blocks' packets together hold 64 KiB,
// more than anyone sends by packets; a slot is several times the bytes that a block has in flight;
// a part has a pack for each thread, and a hop enough not to be outweighed by its flags.
inline constexpr ArenaShape kArenaShape{32, 16, 16, 256, 128 << 10, 32 << 10, 4, 4 << 10, 8 << 10};

// A schedule's chunk: half a FIFO, as two must fit.
JR_HOST_DEVICE constexpr int64_t chunk_bytes_of(const ArenaShape& shape) {
  return shape.slot_bytes * shape.slot_count / 2;
}

// Epochs of one block, which count what it has ever done. Read by all its threads when a kernel
// begins, advanced by one when it ends.
struct alignas(64) BlockState {
  uint64_t arrivals;    // flags raised
  uint64_t iterations;  // staging buffers filled
  uint64_t packets;     // exchanges of packets
};

// Counters that different ranks write are a cache line apart.
struct alignas(64) FifoCounter {
  uint64_t value;
};

// Room for the calls of kMaxRanks ranks.
inline constexpr int64_t kTableBytes = 32 << 10;

// Where each region begins. Computed once, on the host.
struct ArenaLayout {
  ArenaShape shape;
  int world_size;
  int64_t state, table, steps, flags, counters, operands, sums, kept, packets, slots;
  int64_t bytes;  // of the whole arena
};

inline ArenaLayout layout_of(const ArenaShape& shape, int world_size) {
  ArenaLayout layout{};
  layout.shape = shape;
  layout.world_size = world_size;
  int64_t end = kLogOffset;  // before it the word that says that the arena is broken
  const auto region = [&](int64_t bytes) {
    const int64_t begin = end;
    end += (bytes + 255) / 256 * 256;
    return begin;
  };
  const int64_t fifos = int64_t{shape.fifo_blocks} * world_size;
  region(sizeof(CallLog));
  layout.state = region(shape.blocks * sizeof(BlockState));
  layout.table = region(kTableBytes);
  layout.steps = region(fifos * 2 * sizeof(uint64_t));
  layout.flags = region(int64_t{shape.blocks} * world_size * sizeof(uint64_t));
  layout.counters = region(fifos * 2 * sizeof(FifoCounter));
  layout.operands = region(2 * shape.blocks * shape.staged_bytes);
  layout.sums = region(shape.blocks * shape.staged_bytes);  // half as large, as they are shared out
  layout.kept = region(shape.fifo_blocks * chunk_bytes_of(shape));
  layout.packets = region(int64_t{shape.packet_blocks} * 2 * world_size * shape.packet_packs * 2 *
                          sizeof(Packets));
  layout.slots = region(fifos * shape.slot_bytes * shape.slot_count);
  layout.bytes = end;
  return layout;
}

// The memory that multimem instructions reach, at an address of it: a rank's own, or that of the
// multicast object, which stands for all ranks' at once.
//
//   operands   [block][parity]       what the rank has staged
//   sums       [block][parity]       of all ranks' pieces
class Window {
 public:
  JR_DEVICE Window(char* base, const ArenaShape& shape) : base_(base), shape_(shape) {}
  JR_DEVICE char* operands(int block, uint64_t parity) const { return at(block, parity); }
  JR_DEVICE char* sums(int block, uint64_t parity) const { return at(block, 2 + parity); }

 private:
  JR_DEVICE char* at(int block, uint64_t which) const {
    return base_ + (4 * block + static_cast<int64_t>(which)) * shape_.staged_bytes;
  }

  char* base_;
  const ArenaShape& shape_;
};
JR_HOST_DEVICE constexpr int64_t window_bytes_of(const ArenaShape& shape) {
  return 4 * shape.blocks * shape.staged_bytes;
}

// A rank's arena, wherever it is mapped.
class Arena {
 public:
  JR_DEVICE Arena(char* base, const ArenaLayout& layout) : base_(base), layout_(layout) {}

  // Nonzero once a wait of this rank has failed.
  JR_DEVICE uint64_t* broken() const { return reinterpret_cast<uint64_t*>(base_); }
  JR_DEVICE CallLog* log() const { return reinterpret_cast<CallLog*>(base_ + kLogOffset); }
  JR_DEVICE BlockState* state(int block) const {
    return reinterpret_cast<BlockState*>(base_ + layout_.state) + block;
  }
  // Slots passed on the FIFO from (end 0) or to (end 1) the peer.
  JR_DEVICE uint64_t* step(int block, int peer, int end) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.steps) + 2 * pair(block, peer) + end;
  }
  JR_DEVICE uint64_t* flag(int block, int peer) const {
    return reinterpret_cast<uint64_t*>(base_ + layout_.flags) + pair(block, peer);
  }
  JR_DEVICE uint64_t* produced(int block, int peer) const { return counter(block, peer, 0); }
  JR_DEVICE uint64_t* consumed(int block, int peer) const { return counter(block, peer, 1); }
  JR_DEVICE char* operands(int block, uint64_t parity) const {
    return base_ + layout_.operands +
           (2 * block + static_cast<int64_t>(parity)) * layout_.shape.staged_bytes;
  }
  JR_DEVICE char* sums(int block, uint64_t parity) const {
    return base_ + layout_.sums +
           (2 * block + static_cast<int64_t>(parity)) * (layout_.shape.staged_bytes / 2);
  }
  JR_DEVICE char* kept(int block) const {
    return base_ + layout_.kept + block * chunk_bytes_of(layout_.shape);
  }
  // Those of the next peer follow packets_per_peer() further on.
  JR_DEVICE Packets* packets(int block, uint64_t parity, int peer) const {
    const int64_t region = (2 * block + static_cast<int64_t>(parity)) * layout_.world_size + peer;
    return reinterpret_cast<Packets*>(base_ + layout_.packets) + region * packets_per_peer();
  }
  JR_DEVICE int packets_per_peer() const { return 2 * layout_.shape.packet_packs; }
  JR_DEVICE char* slot(int block, int peer, uint64_t step) const {
    const int64_t fifo = pair(block, peer) * layout_.shape.slot_count;
    return base_ + layout_.slots +
           (fifo + static_cast<int64_t>(step % layout_.shape.slot_count)) *
               layout_.shape.slot_bytes;
  }

 private:
  JR_DEVICE int pair(int block, int peer) const { return block * layout_.world_size + peer; }
  JR_DEVICE uint64_t* counter(int block, int peer, int which) const {
    return &reinterpret_cast<FifoCounter*>(base_ + layout_.counters)[2 * pair(block, peer) + which]
                .value;
  }

  char* base_;
  const ArenaLayout& layout_;
};

}  // namespace jaxring::cuda
