// The one list of algorithms, and the one place where a name becomes a schedule.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "xla_ffi/algorithms/direct.h"
#include "xla_ffi/algorithms/reducer.h"
#include "xla_ffi/algorithms/ring.h"
#include "xla_ffi/algorithms/tree.h"

namespace jaxring {

// X(enumerator, name, channels, whether sums are in rank order, summary)
#define JR_FOR_EACH_ALGORITHM(X)                                                                   \
  X(kDirect, "direct", 1, true, "all to all, rank-order sums; lowest latency, best within a host") \
  X(kRing, "ring", 1, false, "bandwidth-optimal ring, as in baidu-allreduce")                      \
  X(kTree, "tree", 2, false, "double binary tree: logarithmic latency, near-optimal bandwidth")    \
  X(kReducer, "reducer", 1, true, "everything through rank 0: the parameter-server baseline")

enum class Algorithm : uint8_t {
  kAuto,
#define JR_X(enumerator, name, channels, rank_order, summary) enumerator,
  JR_FOR_EACH_ALGORITHM(JR_X)
#undef JR_X
};

struct AlgorithmInfo {
  Algorithm algorithm;
  std::string_view name;
  int channels;
  bool rank_order;
  std::string_view summary;
};

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {Algorithm::kAuto, "auto", 0, false, "chosen by message size and topology"},
#define JR_X(enumerator, name, channels, rank_order, summary) \
  {Algorithm::enumerator, name, channels, rank_order, summary},
    JR_FOR_EACH_ALGORITHM(JR_X)
#undef JR_X
};

inline const AlgorithmInfo& info_of(Algorithm algorithm) {
  return kAlgorithms[static_cast<int>(algorithm)];
}

inline std::optional<Algorithm> algorithm_from_name(std::string_view name) {
  for (const AlgorithmInfo& info : kAlgorithms) {
    if (info.name == name) return info.algorithm;
  }
  return std::nullopt;
}

// The number of channels, for host and device (a device cannot read the host's table above).
JR_HOST_DEVICE constexpr int channels_of(Algorithm algorithm) {
  switch (algorithm) {
#define JR_X(enumerator, name, channels, rank_order, summary) \
  case Algorithm::enumerator:                                 \
    return channels;
    JR_FOR_EACH_ALGORITHM(JR_X)
#undef JR_X
    case Algorithm::kAuto:
      break;
  }
  return 0;
}

// Runs one channel of the named schedule on `prims`. `algorithm` is never kAuto here.
template <class Prims>
JR_HOST_DEVICE void run_allreduce(Algorithm algorithm, int channel, Prims& prims, World world,
                                  Range message) {
  if (world.world_size == 1) return prims.copy(message);
  switch (algorithm) {
    case Algorithm::kDirect:
      return direct_allreduce(prims, world, message);
    case Algorithm::kRing:
      return ring_allreduce(prims, world, message);
    case Algorithm::kTree:
      return tree_allreduce(prims, world, double_binary_tree(world.rank, world.world_size, channel),
                            piece_of(message, channels_of(algorithm), channel));
    case Algorithm::kReducer:
      return reducer_allreduce(prims, world, message);
    case Algorithm::kAuto:
      return;
  }
}

}  // namespace jaxring
