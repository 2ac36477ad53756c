// How a call is run: a pure function of what all ranks know, so that all choose alike; and what a
// kernel is launched with.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>

#include "xla_ffi/cuda/arena.h"
#include "xla_ffi/cuda/kernels.h"

namespace jaxring::cuda {

// The code that runs a call.
enum class Road : uint8_t {
  kLocal,  // a world of one
  kPackets,
  kOneShot,
  kTwoShot,
  kMultimem,
  kSchedule,  // one of algorithms/, over FIFOs
};

// A message consists of pieces of one length: one where all ranks number its elements alike, one
// for each rank in reduce_scatter, all_gather and all_to_all. It is cut in packs of 16 bytes.
struct Plan {
  Collective collective;
  ReduceOp op;
  DType dtype;  // uint8 for what only moves
  Algorithm algorithm;
  Road road;
  int world_size;
  int root;
  int parts;     // each piece is cut into so many, one for each block,
  int channels;  // or for so many blocks, which share the part by the schedule's rule
  int element_bytes;
  int wide_packs;  // packs that hold a pack's elements as partial results
  int64_t piece_bytes;
  int64_t divisor;  // of a mean, else 0
  int poison_byte;  // fills the output after a failure; -1: nothing does
  ArenaLayout arena;

  JR_HOST_DEVICE int blocks() const { return parts * channels; }
};

// One rank's kernel argument.
struct RankCall {
  DeviceWorld world;
  Plan plan;
  int site;
  int destination;  // of a ppermute, -1 for nowhere
  int source;
  const void* input;
  void* output;
};

// Thresholds in bytes of a piece, from published measurements of other libraries on 8 GPUs
// (MSCCL++, vLLM, NCCL); unmeasured here.
inline constexpr int64_t kPacketBytes = 32 << 10;
inline constexpr int64_t kOneShotBytes = 256 << 10;
inline constexpr int64_t kTwoShotBytes = 8 << 20;

// Of a block. As many as leave a thread 255 registers: the kernels spill at half of that.
inline constexpr int kThreads = 256;

// Whether a rank's message has a piece for each rank.
JR_HOST_DEVICE constexpr bool operand_in_pieces(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllToAll;
}
JR_HOST_DEVICE constexpr bool result_in_pieces(Collective collective) {
  return collective == Collective::kAllGather || collective == Collective::kAllToAll;
}

// All bits set is a NaN of every float but those whose only NaN is -0 ("fnuz").
constexpr int poison_of(DType dtype) {
  return visit_dtype(dtype, [](auto storage) {
    using T = decltype(storage);
    if constexpr (is_complex_v<T>) {
      return 0xff;
    } else if constexpr (is_float_v<T>) {
      const std::string_view name = name_of(DTypeTraits<T>::dtype);
      return name.substr(name.size() - 2) == "uz" ? 0x80 : 0xff;
    } else {
      return -1;
    }
  });
}

// What NVLink's switches sum as we promise it: 16-bit floats in float32 and rounded once, which a
// mean of theirs would be twice.
constexpr bool multimem_reduces(ReduceOp op, DType dtype) {
  const bool narrow = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  return op == ReduceOp::kSum ? narrow || dtype == DType::kFloat32
                              : op == ReduceOp::kMean && dtype == DType::kFloat32;
}

// Of two ranks each has one to read from, whom it needs no switch for.
inline bool chooses_multimem(const KernelCall& call, int world_size, int64_t piece_bytes) {
  return call.multimem && !call.deterministic && call.algorithm == Algorithm::kAuto &&
         call.collective == Collective::kAllreduce && multimem_reduces(call.op, call.dtype) &&
         world_size > 2 && piece_bytes > kOneShotBytes;
}

inline Algorithm algorithm_of(const KernelCall& call, int world_size, int64_t piece_bytes) {
  if (call.algorithm != Algorithm::kAuto && serves(call.algorithm, call.collective) &&
      runs_on_devices(call.algorithm)) {
    return call.algorithm;
  }
  if (chooses_multimem(call, world_size, piece_bytes)) return Algorithm::kDirect;
  const bool any_order = !call.deterministic || !reduces(call.collective);
  const bool halves = serves(Algorithm::kRing, call.collective);
  const int64_t whole = call.collective == Collective::kAllreduce ? 1 : world_size;
  if (any_order && halves && piece_bytes * whole > kTwoShotBytes) return Algorithm::kRing;
  return Algorithm::kDirect;
}

inline Road road_of(const KernelCall& call, Algorithm algorithm, int world_size,
                    int64_t piece_bytes, const ArenaShape& shape) {
  if (world_size == 1) return Road::kLocal;
  if (call.collective == Collective::kBarrier) return Road::kPackets;
  if (algorithm != Algorithm::kDirect) return Road::kSchedule;
  const bool has_two = call.collective == Collective::kAllreduce;
  switch (call.method) {
    case Method::kPackets:
      return Road::kPackets;
    case Method::kOneShot:
      return Road::kOneShot;
    case Method::kTwoShot:
      return has_two ? Road::kTwoShot : Road::kOneShot;
    case Method::kMultimem:
      return Road::kMultimem;
    case Method::kBySize:
      break;
  }
  if (chooses_multimem(call, world_size, piece_bytes)) return Road::kMultimem;
  const int64_t packet_bytes =
      int64_t{shape.packet_blocks} * shape.packet_packs * kPackBytes;  // all that fits
  if (piece_bytes <= std::min(kPacketBytes, packet_bytes)) return Road::kPackets;
  // Of two ranks each has one to read from: two shots would read as much in twice the time.
  return has_two && world_size > 2 && piece_bytes > kOneShotBytes ? Road::kTwoShot : Road::kOneShot;
}

// As many parts as give each thread a pack (each hop its bytes), as far as there are blocks.
inline int parts_of(const KernelCall& call, const Plan& plan) {
  const ArenaShape& shape = plan.arena.shape;
  const auto at_least = [](int64_t wanted, int64_t per_part) {
    return (wanted + per_part - 1) / per_part;
  };
  int64_t most = shape.blocks;
  int64_t wanted = at_least(plan.piece_bytes, shape.part_bytes);
  if (plan.road == Road::kPackets) {
    most = shape.packet_blocks;
    wanted = at_least(plan.piece_bytes, int64_t{shape.packet_packs} * kPackBytes);
  } else if (plan.road == Road::kSchedule) {
    most = shape.fifo_blocks / plan.channels;
    wanted = at_least(plan.piece_bytes, shape.hop_bytes * plan.world_size);
  }
  if (call.max_blocks > 0) most = std::min<int64_t>(most, call.max_blocks / plan.channels);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, std::max<int64_t>(most, 1)));
}

// The plan of a call that serves() accepts.
inline Plan plan_of(const KernelCall& call, int world_size, const ArenaShape& shape) {
  Plan plan{};
  plan.arena = layout_of(shape, world_size);
  plan.world_size = world_size;
  plan.collective = call.collective;
  plan.op = call.op;
  plan.root = call.root;
  const bool moves = !reduces(call.collective);
  const int64_t element_bytes = size_of(call.dtype);
  plan.dtype = moves ? DType::kUInt8 : call.dtype;
  const int64_t count = call.collective == Collective::kBarrier ? 0 : call.count;
  plan.element_bytes = size_of(plan.dtype);
  plan.wide_packs = accumulator_size_of(plan.dtype) / size_of(plan.dtype);
  plan.piece_bytes =
      (operand_in_pieces(call.collective) ? count / world_size : count) * element_bytes;
  plan.algorithm = algorithm_of(call, world_size, plan.piece_bytes);
  plan.road = road_of(call, plan.algorithm, world_size, plan.piece_bytes, shape);
  plan.channels = plan.road == Road::kSchedule ? channels_of(plan.algorithm, call.collective) : 1;
  plan.divisor = !moves && call.op == ReduceOp::kMean ? world_size : 0;
  plan.poison_byte = call.collective == Collective::kBarrier ? -1 : poison_of(call.dtype);
  plan.parts = parts_of(call, plan);
  return plan;
}

inline RankCall rank_call(const DeviceWorld& world, const KernelCall& call, const Plan& plan) {
  RankCall result{world, plan, call.site, -1, -1, call.input, call.output};
  if (call.collective == Collective::kPermute) {
    result.destination = call.destinations[world.rank];
    for (int rank = 0; rank < world.world_size; ++rank) {
      if (call.destinations[rank] == world.rank) result.source = rank;
    }
  }
  return result;
}

// serves() with any arena; nothing if the call can run, else why not.
inline std::optional<std::string> refusal_of(const KernelCall& call, int world_size,
                                             const ArenaShape& shape) {
  const auto text = [](int64_t number) { return std::to_string(number); };
  const std::string name = name_of(call.collective);
  if (world_size < 1 || world_size > kMaxRanks) {
    return name + ": the CUDA kernels serve 1 to " + text(kMaxRanks) + " ranks, not " +
           text(world_size) + "; use a communicator of fewer GPUs or fallback=\"lax\"";
  }
  if (reduces(call.collective) && !supports(call.op, call.dtype)) {
    return name + ": op " + name_of(call.op) + " has no meaning for " + name_of(call.dtype);
  }
  if (call.count < 0 || (operand_in_pieces(call.collective) && call.count % world_size != 0)) {
    return name + ": an operand of " + text(call.count) + " elements can't be cut into " +
           text(world_size) + " equal pieces";
  }
  if (call.root < 0 || call.root >= world_size) {
    return name + ": root " + text(call.root) + " isn't in 0.." + text(world_size - 1);
  }
  for (int rank = 0; call.collective == Collective::kPermute && rank < world_size; ++rank) {
    if (call.destinations[rank] < -1 || call.destinations[rank] >= world_size) {
      return name + ": rank " + text(rank) + " sends to " + text(call.destinations[rank]) +
             ", which isn't in 0.." + text(world_size - 1);
    }
  }
  const bool asks_multimem = call.method == Method::kMultimem;
  if (asks_multimem && !(call.multimem && call.collective == Collective::kAllreduce &&
                         multimem_reduces(call.op, call.dtype))) {
    return name +
           ": multimem needs a multicast object and an allreduce by sum of float32, float16 " +
           "or bfloat16, or by mean of float32; use another method";
  }
  if (call.site < 0 || call.site >= kMostSites) {
    return name + ": site " + text(call.site) + " isn't in 0.." + text(kMostSites - 1);
  }
  const Plan plan = plan_of(call, world_size, shape);
  if (call.max_blocks > 0 && plan.blocks() > call.max_blocks) {
    return name + ": algorithm " + std::string(info_of(plan.algorithm).name) + " needs " +
           text(plan.channels) + " blocks, but max_blocks is " + text(call.max_blocks);
  }
  const int64_t all_parts = int64_t{plan.parts} * kPackBytes;
  const int64_t part_packs = (plan.piece_bytes + all_parts - 1) / all_parts;
  if (plan.road == Road::kPackets && part_packs > shape.packet_packs) {
    return name + ": a message of " + text(call.count) + " elements of " + name_of(call.dtype) +
           " doesn't fit the packets of " + text(plan.parts) + " blocks; use another method";
  }
  return std::nullopt;
}

}  // namespace jaxring::cuda
