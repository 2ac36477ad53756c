// The one list of algorithms, and the one place where a name becomes a schedule.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "xla_ffi/algorithms/direct.h"
#include "xla_ffi/algorithms/halving_doubling.h"
#include "xla_ffi/algorithms/hierarchical.h"
#include "xla_ffi/algorithms/hierarchical_blocks.h"
#include "xla_ffi/algorithms/reducer.h"
#include "xla_ffi/algorithms/ring.h"
#include "xla_ffi/algorithms/tree.h"
#include "xla_ffi/algorithms/work.h"

namespace jaxring {

// The collectives that an algorithm has a schedule for, as a set.
constexpr uint32_t only(Collective collective) { return 1u << static_cast<int>(collective); }
constexpr uint32_t kServesHalves =
    only(Collective::kAllreduce) | only(Collective::kReduceScatter) | only(Collective::kAllGather);
constexpr uint32_t kServesRooted =
    only(Collective::kAllreduce) | only(Collective::kBroadcast) | only(Collective::kReduce);
constexpr uint32_t kServesLevels = kServesHalves | kServesRooted;

// X(enumerator, name, channels of an allreduce, whether sums are in rank order, collectives,
// summary)
#define JR_FOR_EACH_ALGORITHM(X)                                                              \
  X(kDirect, "direct", 1, true, ~0u,                                                          \
    "all to all, rank-order sums; lowest latency, best within a host")                        \
  X(kRing, "ring", 1, false, kServesHalves, "bandwidth-optimal ring, as in baidu-allreduce")  \
  X(kTree, "tree", 2, false, kServesRooted,                                                   \
    "double binary tree: logarithmic latency, near-optimal bandwidth")                        \
  X(kHalvingDoubling, "halving_doubling", 1, false, only(Collective::kAllreduce),             \
    "recursive halving and doubling: logarithmic latency, bandwidth-optimal for powers of 2") \
  X(kChain, "chain", 1, true, only(Collective::kAllreduce),                                   \
    "pipelined chain: rank-order sums for large messages")                                    \
  X(kHierarchical, "hierarchical", 2, false, kServesLevels,                                   \
    "direct within a host, a ring between hosts: the fewest bytes on each host's link")       \
  X(kReducer, "reducer", 1, true, only(Collective::kAllreduce),                               \
    "everything through rank 0: the parameter-server baseline")

enum class Algorithm : uint8_t {
  kAuto,
#define JR_X(enumerator, name, channels, rank_order, serves, summary) enumerator,
  JR_FOR_EACH_ALGORITHM(JR_X)
#undef JR_X
};

struct AlgorithmInfo {
  Algorithm algorithm;
  std::string_view name;
  int channels;
  bool rank_order;
  uint32_t serves;
  std::string_view summary;
};

inline constexpr AlgorithmInfo kAlgorithms[] = {
    {Algorithm::kAuto, "auto", 0, false, ~0u, "chosen by message size and topology"},
#define JR_X(enumerator, name, channels, rank_order, serves, summary) \
  {Algorithm::enumerator, name, channels, rank_order, serves, summary},
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

// The others are schedules of hosts only.
inline bool runs_on_devices(Algorithm algorithm) { return algorithm != Algorithm::kHierarchical; }

inline bool serves(Algorithm algorithm, Collective collective) {
  return (info_of(algorithm).serves & only(collective)) != 0;
}

// The number of channels, for host and device (a device cannot read the host's table above).
JR_HOST_DEVICE constexpr int channels_of(Algorithm algorithm, Collective collective) {
  if (collective != Collective::kAllreduce) return 1;
  switch (algorithm) {
#define JR_X(enumerator, name, channels, rank_order, serves, summary) \
  case Algorithm::enumerator:                                         \
    return channels;
    JR_FOR_EACH_ALGORITHM(JR_X)
#undef JR_X
    case Algorithm::kAuto:
      break;
  }
  return 0;
}

// Which schedules run_schedule has code for. A device does without the direct ones, which it has
// other means for (compiling them for it takes minutes), and those of several levels, which
// allocate.
struct EverySchedule {
  static constexpr bool reducing = true, moving = true, direct = true, levels = true;
};

// Runs one channel of the named schedule on `prims`. `algorithm` is never kAuto here.
template <class Compiled = EverySchedule, class Prims>
JR_HOST_DEVICE void run_allreduce(Algorithm algorithm, int channel, Prims& prims, World world,
                                  Range message) {
  switch (algorithm) {
    case Algorithm::kDirect:
      if constexpr (Compiled::direct) direct_allreduce(prims, world, message);
      return;
    case Algorithm::kRing:
      return ring_allreduce(prims, world, message);
    case Algorithm::kTree:
    case Algorithm::kChain: {
      const bool tree = algorithm == Algorithm::kTree;
      return tree_allreduce(prims, world,
                            tree ? double_binary_tree(world.rank, world.world_size, channel)
                                 : chain(world.rank, world.world_size),
                            tree ? piece_of(message, 2, channel) : message);
    }
    case Algorithm::kHalvingDoubling:
      return halving_doubling_allreduce(prims, world, message);
    case Algorithm::kReducer:
      return reducer_allreduce(prims, world, message);
    case Algorithm::kHierarchical:
      if constexpr (Compiled::levels) {
        hierarchical_allreduce(prims, world, piece_of(message, 2, channel));
      }
      return;
    case Algorithm::kAuto:
      return;
  }
}

// Whether there was a schedule other than a direct one, which has then run.
template <class Compiled, class Prims>
JR_HOST_DEVICE bool run_indirect(Algorithm algorithm, int channel, Prims& prims, World world,
                                 const Work& work) {
  const bool ring = algorithm == Algorithm::kRing;
  const bool tree = algorithm == Algorithm::kTree;
  [[maybe_unused]] const bool levels = algorithm == Algorithm::kHierarchical;
  const auto node = [&] { return rooted_tree(world.rank, world.world_size, work.root); };
  if constexpr (Compiled::reducing) {
    if (work.collective == Collective::kAllreduce) {
      run_allreduce<Compiled>(algorithm, channel, prims, world, work.message);
      return true;
    }
    if (ring && work.collective == Collective::kReduceScatter) {
      ring_reduce_scatter(prims, world, work.message);
      return true;
    }
    if constexpr (Compiled::levels) {
      if (levels && work.collective == Collective::kReduce) {
        hierarchical_reduce(prims, world, work.message, work.root);
        return true;
      }
      if (levels && work.collective == Collective::kReduceScatter) {
        hierarchical_reduce_scatter(prims, world, work.message);
        return true;
      }
    }
    if (tree && work.collective == Collective::kReduce) {
      tree_reduce(prims, world, node(), work.message);
      return true;
    }
  }
  if constexpr (Compiled::moving) {
    if (ring && work.collective == Collective::kAllGather) {
      ring_all_gather(prims, world, work.message);
      return true;
    }
    if constexpr (Compiled::levels) {
      if (levels && work.collective == Collective::kBroadcast) {
        hierarchical_broadcast(prims, world, work.message, work.root);
        return true;
      }
      if (levels && work.collective == Collective::kAllGather) {
        hierarchical_all_gather(prims, world, work.message);
        return true;
      }
    }
    if (tree && work.collective == Collective::kBroadcast) {
      tree_broadcast(prims, world, node(), work.message);
      return true;
    }
  }
  return false;
}

// As run_allreduce, for any collective that the algorithm serves.
template <class Compiled = EverySchedule, class Prims>
JR_HOST_DEVICE void run_schedule(Algorithm algorithm, int channel, Prims& prims, World world,
                                 const Work& work) {
  if (work.collective == Collective::kPermute) {
    if constexpr (Compiled::direct) direct_permute(prims, world, work);
    return;
  }
  if (world.world_size == 1) return prims.copy(work.message);
  if (run_indirect<Compiled>(algorithm, channel, prims, world, work)) return;
  if constexpr (Compiled::direct) {
    switch (work.collective) {
      case Collective::kReduceScatter:
        return direct_reduce_scatter(prims, world, work.message);
      case Collective::kAllGather:
        return direct_all_gather(prims, world, work.message);
      case Collective::kAllToAll:
        return direct_all_to_all(prims, world, work.message);
      case Collective::kBroadcast:
        return direct_broadcast(prims, world, work.message, work.root);
      case Collective::kReduce:
        return direct_reduce(prims, world, work.message, work.root);
      case Collective::kAllreduce:  // above
      case Collective::kPermute:
      case Collective::kBarrier:  // has no message
        return;
    }
  }
}

}  // namespace jaxring
