// jaxring._native.simulate and .schedule: a schedule on a clock, or as a list, without running it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <tuple>

#include "xla_ffi/algorithms/simulation.h"
#include "xla_ffi/core/host_layout.h"
#include "xla_ffi/ffi/module.h"
#include "xla_ffi/host/plan.h"

namespace nb = nanobind;

namespace jaxring {
namespace {

using LatencyAndBytes = std::pair<double, double>;  // s, s per byte

std::pair<Collective, Algorithm> known_schedule(const std::string& collective,
                                                const std::string& algorithm) {
  const std::optional<Collective> known_collective = collective_from_name(collective);
  const std::optional<Algorithm> known_algorithm = algorithm_from_name(algorithm);
  if (!known_collective || !known_algorithm || *known_algorithm == Algorithm::kAuto ||
      !serves(*known_algorithm, *known_collective)) {
    throw std::invalid_argument(algorithm + " has no schedule for " + collective);
  }
  return {*known_collective, *known_algorithm};
}

nb::list ranks_of(const Peers& peers) {
  nb::list ranks;
  for (int i = 0; i < peers.count(); ++i) ranks.append(peers[i]);
  return ranks;
}

// By rank: its steps in their order, as (channel, from, to, first element, elements, is a sum).
nb::list schedule_by_name(const std::string& collective, const std::string& algorithm,
                          int world_size, int ranks_per_host, int64_t count,
                          int64_t chunk_elements) {
  const auto [which, how] = known_schedule(collective, algorithm);
  std::vector<int> host_of(world_size);
  for (int rank = 0; rank < world_size; ++rank) host_of[rank] = rank / ranks_per_host;
  const HostLayout hosts(host_of);
  Work work{which, Range{0, count}};
  nb::list by_rank;
  for (int rank = 0; rank < world_size; ++rank) {
    if (which == Collective::kPermute) {
      work.destination = (rank + 1) % world_size;
      work.source = (rank + world_size - 1) % world_size;
    }
    nb::list steps;
    for (int channel = 0; channel < channels_of(how, which); ++channel) {
      PlanPrims prims;
      run_schedule(how, channel, prims, World{rank, world_size, chunk_elements, &hosts}, work);
      for (const Step& step : prims.take()) {
        const bool sums = step.from.count() > 0 && step.own != Own::kNothing;
        steps.append(nb::make_tuple(channel, ranks_of(step.from), ranks_of(step.to),
                                    step.range.offset, step.range.count, sums));
      }
    }
    by_rank.append(steps);
  }
  return by_rank;
}

nb::dict simulate_by_name(const std::string& collective, const std::string& algorithm,
                          int world_size, int ranks_per_host, int64_t count, int64_t element_bytes,
                          int64_t wire_bytes, int64_t chunk_bytes, LatencyAndBytes within,
                          LatencyAndBytes between, double reduce_s_per_byte, bool hops) {
  SimulatedCall call;
  std::tie(call.collective, call.algorithm) = known_schedule(collective, algorithm);
  call.world_size = world_size;
  call.count = count;
  call.element_bytes = element_bytes;
  call.wire_bytes = wire_bytes;
  call.chunk_elements = std::max<int64_t>(1, chunk_bytes / wire_bytes);
  Machine machine;
  machine.ranks_per_host = ranks_per_host;
  machine.within = Link{within.first, within.second};
  machine.between = Link{between.first, between.second};
  machine.reduce_s_per_byte = reduce_s_per_byte;
  SimulatedRun run;
  int64_t hop_count = 0;
  {
    nb::gil_scoped_release release;
    run = simulate(call, machine);
    if (hops) hop_count = hops_of(call, ranks_per_host);
  }
  nb::dict result;
  result["time_s"] = run.time_s;
  result["messages"] = run.messages;
  result["rank_bytes_sent"] = run.rank_bytes_sent;
  result["host_bytes_sent"] = run.host_bytes_sent;
  if (hops) result["hops"] = hop_count;
  return result;
}

}  // namespace

void bind_simulation(nb::module_& m) {
  m.def("simulate", &simulate_by_name, nb::arg("collective"), nb::arg("algorithm"),
        nb::arg("world_size"), nb::arg("ranks_per_host"), nb::arg("count"),
        nb::arg("element_bytes"), nb::arg("wire_bytes"), nb::arg("chunk_bytes"), nb::arg("within"),
        nb::arg("between"), nb::arg("reduce_s_per_byte"), nb::arg("hops") = true,
        "The time, hops and bytes of a schedule; links are (latency_s, s_per_byte).");
  m.def("schedule", &schedule_by_name, nb::arg("collective"), nb::arg("algorithm"),
        nb::arg("world_size"), nb::arg("ranks_per_host"), nb::arg("count"),
        nb::arg("chunk_elements"),
        "The steps of each rank, as (channel, from, to, first element, elements, is a sum).");
}

}  // namespace jaxring
