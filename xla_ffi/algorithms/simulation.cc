#include "xla_ffi/algorithms/simulation.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace jaxring {
namespace {

struct TimedStep {
  Peers from;
  Peers to;
  int64_t count;
  bool receives_partial;
  bool sends_partial;
};

// Records `capacity` steps of a schedule from step `first` on. The steps of 4,096 ranks together
// would not fit into memory, and running a template again costs little.
class WindowPrims : public Verbs<WindowPrims> {
 public:
  WindowPrims(int64_t first, std::vector<TimedStep>& steps) : first_(first), steps_(steps) {}

  void step(Peers from, Peers to, Range range, Own own, Into into) {
    if (range.count == 0) return;  // empty chunks are not sent
    if (next_++ < first_ || steps_.size() == steps_.capacity()) return;
    steps_.push_back(
        TimedStep{from, to, range.count, jaxring::receives_partial(own), !is_final(into)});
  }

 private:
  const int64_t first_;
  int64_t next_ = 0;
  std::vector<TimedStep>& steps_;
};

// When the messages from one peer arrive, in the order in which they were sent.
struct Arrivals {
  explicit Arrivals(int peer) : from(peer) {}
  int from;
  std::vector<double> times_s;
  size_t taken = 0;

  bool empty() const { return taken == times_s.size(); }
  void push(double time_s) {
    if (empty()) {
      times_s.clear();
      taken = 0;
    }
    times_s.push_back(time_s);
  }
};

// One channel of one rank.
struct Runner {
  Runner(int rank_, int channel_) : rank(rank_), channel(channel_) {}

  // Most schedules have few peers; those with many meet them in the order of their ranks, so that
  // the next one is found where the last one was.
  Arrivals& from(int peer) {
    for (size_t i = 0; i < inbox.size(); ++i) {
      if (hint == inbox.size()) hint = 0;
      if (inbox[hint].from == peer) return inbox[hint];
      ++hint;
    }
    inbox.emplace_back(peer);
    return inbox.back();
  }

  int rank;
  int channel;
  double time_s = 0;  // when its last step ended
  int64_t first = 0;  // the number of steps[0]
  size_t index = 0;   // of the step under way
  int received = 0;   // how many of that step's messages have come
  double last_arrival_s = 0;
  std::vector<TimedStep> steps;
  bool ended = false;
  int waits_for = -1;  // the peer that its next message comes from
  std::vector<Arrivals> inbox;
  size_t hint = 0;
};

class Simulation {
 public:
  Simulation(const SimulatedCall& call, const Machine& machine)
      : call_(call),
        machine_(machine),
        layout_(hosts_by_rank(call.world_size, machine.ranks_per_host)),
        channels_(channels_of(call.algorithm, call.collective)),
        ports_(call.world_size),
        out_(hosts()),
        in_(hosts()),
        rank_bytes_(call.world_size),
        host_bytes_(hosts()) {
    constexpr size_t kBytes = 384 << 20, kMostSteps = 1 << 13;
    const size_t runners = static_cast<size_t>(call.world_size) * channels_;
    const size_t window = std::min(kMostSteps, kBytes / sizeof(TimedStep) / runners + 1);
    runners_.reserve(runners);
    for (int rank = 0; rank < call.world_size; ++rank) {
      for (int channel = 0; channel < channels_; ++channel) {
        runners_.emplace_back(rank, channel);
        runners_.back().steps.reserve(window);
        ready_.push({0.0, runners_.size() - 1});
      }
    }
  }

  SimulatedRun run() {
    // In the order of time, so that a shared interface serves who comes first.
    while (!ready_.empty()) {
      const size_t index = ready_.top().second;
      ready_.pop();
      advance(runners_[index]);
    }
    for (const Runner& runner : runners_) {
      if (!runner.ended) {
        throw std::runtime_error("simulate: rank " + std::to_string(runner.rank) +
                                 " waits for ever");
      }
      result_.time_s = std::max(result_.time_s, runner.time_s);
    }
    result_.rank_bytes_sent = *std::max_element(rank_bytes_.begin(), rank_bytes_.end());
    result_.host_bytes_sent = *std::max_element(host_bytes_.begin(), host_bytes_.end());
    return result_;
  }

 private:
  static std::vector<int> hosts_by_rank(int world_size, int ranks_per_host) {
    std::vector<int> hosts(world_size);
    for (int rank = 0; rank < world_size; ++rank) hosts[rank] = rank / ranks_per_host;
    return hosts;
  }
  int hosts() const { return layout_.host_count(); }
  int host_of(int rank) const { return layout_.host_of[rank]; }
  size_t index_of(int rank, int channel) const { return rank * channels_ + channel; }

  // One step, if all its messages have come.
  void advance(Runner& runner) {
    if (runner.index == runner.steps.size() && !refill(runner)) return;
    const TimedStep& step = runner.steps[runner.index];
    for (; runner.received < step.from.count(); ++runner.received) {
      const int peer = step.from[runner.received];
      Arrivals& arrivals = runner.from(peer);
      if (arrivals.empty()) {
        runner.waits_for = peer;
        return;
      }
      runner.last_arrival_s = std::max(runner.last_arrival_s, arrivals.times_s[arrivals.taken++]);
    }
    runner.time_s = std::max(runner.time_s, runner.last_arrival_s);
    if (step.receives_partial) {
      const int64_t bytes = step.from.count() * step.count * call_.wire_bytes;
      runner.time_s += bytes * machine_.reduce_s_per_byte;
    }
    const int64_t bytes =
        step.count * (step.sends_partial ? call_.wire_bytes : call_.element_bytes);
    for (int i = 0; i < step.to.count(); ++i) send(runner, step.to[i], bytes);
    ++result_.steps;
    ++runner.index;
    runner.received = 0;
    runner.last_arrival_s = 0;
    ready_.push({runner.time_s, index_of(runner.rank, runner.channel)});
  }

  bool refill(Runner& runner) {
    runner.first += runner.steps.size();
    runner.steps.clear();
    runner.index = 0;
    WindowPrims prims(runner.first, runner.steps);
    const World world{runner.rank, call_.world_size, call_.chunk_elements, &layout_};
    run_schedule(call_.algorithm, runner.channel, prims, world,
                 Work{call_.collective, Range{0, call_.count}});
    runner.ended = runner.steps.empty();
    return !runner.ended;
  }

  void send(Runner& runner, int to, int64_t bytes) {
    const int here = host_of(runner.rank), there = host_of(to);
    const Link& link = here == there ? machine_.within : machine_.between;
    const double copy_s = bytes * link.s_per_byte;
    double sent_s;
    if (here == there) {
      double& port_s = ports_[runner.rank];  // its channels share the rank's memory bandwidth
      port_s = runner.time_s = sent_s = std::max(runner.time_s, port_s) + copy_s;
    } else {
      out_[here] = std::max(runner.time_s, out_[here]) + copy_s;
      in_[there] = sent_s = std::max(out_[here], in_[there] + copy_s);
      host_bytes_[here] += bytes;
    }
    rank_bytes_[runner.rank] += bytes;
    ++result_.messages;
    const double arrival_s = sent_s + link.latency_s;
    Runner& receiver = runners_[index_of(to, runner.channel)];
    receiver.from(runner.rank).push(arrival_s);
    if (receiver.waits_for == runner.rank) {
      receiver.waits_for = -1;
      ready_.push({std::max(receiver.time_s, arrival_s), index_of(to, runner.channel)});
    }
  }

  const SimulatedCall call_;
  const Machine machine_;
  const HostLayout layout_;
  const int channels_;
  std::vector<Runner> runners_;
  using Ready = std::pair<double, size_t>;
  std::priority_queue<Ready, std::vector<Ready>, std::greater<Ready>> ready_;
  std::vector<double> ports_;     // by rank: when it is free
  std::vector<double> out_, in_;  // by host: when the interface is
  std::vector<int64_t> rank_bytes_, host_bytes_;
  SimulatedRun result_;
};

}  // namespace

SimulatedRun simulate(const SimulatedCall& call, const Machine& machine) {
  return Simulation(call, machine).run();
}

int64_t hops_of(const SimulatedCall& call, int ranks_per_host) {
  Machine machine;
  machine.ranks_per_host = ranks_per_host;
  machine.within.latency_s = machine.between.latency_s = 1;
  return std::llround(simulate(call, machine).time_s);
}

}  // namespace jaxring
