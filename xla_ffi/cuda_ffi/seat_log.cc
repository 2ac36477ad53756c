// What a seat can tell of its calls: for jaxring.stats(), the flight record and the watchdog.
#include <cmath>
#include <thread>

#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/cuda_ffi/host_words.h"

namespace jaxring::cuda {
namespace {

// A copy waits for no rank; where it takes longer the GPU is not to be had.
constexpr auto kLogPatience = std::chrono::seconds(1);
constexpr auto kLogPause = std::chrono::microseconds(50);

// Of an allreduce by a ring, as between hosts.
int64_t ring_bytes(int64_t bytes, int64_t ranks) { return 2 * (ranks - 1) * bytes / ranks; }

}  // namespace

int Seat::site_of(const Site& site) {
  std::lock_guard<std::mutex> lock(log_mutex_);
  for (size_t i = 1; i < sites_.size(); ++i) {
    if (sites_[i].name == site.name && sites_[i].signature == site.signature) {
      return static_cast<int>(i);
    }
  }
  const bool last = sites_.size() == kMostSites - 1;
  if (sites_.size() < kMostSites) {
    sites_.push_back(last ? Site{"other", "", "further calls", "", {"other", 0, 0}} : site);
  }
  return static_cast<int>(sites_.size() - 1);
}

Site Seat::site(int number) const {
  std::lock_guard<std::mutex> lock(log_mutex_);
  return number < static_cast<int>(sites_.size()) ? sites_[number] : Site{};
}

Traffic Seat::traffic_of(const KernelCall& call) const {
  if (plan_.reach == Reach::kMapped) {
    return backend().kernels->traffic(call, rank_, world_size_);
  }
  if (plan_.reach == Reach::kNccl || call.collective != Collective::kAllreduce) {
    return {"nccl", 0, 0};
  }
  const int64_t bytes = call.count * static_cast<int64_t>(size_of(call.dtype));
  const int64_t hosts = world_size_ / world_.world_size;
  const int64_t all =
      ring_bytes(bytes, world_.world_size) + ring_bytes(bytes / world_.world_size, hosts);
  return {"hierarchical", all, all};
}

std::optional<CallLog> Seat::log() const {
  if (log_stream_ == nullptr) return std::nullopt;
  const OnDevice on_device(device_);
  if (on_device.failure()) return std::nullopt;
  const Runtime& runtime = *backend().runtime;
  const char* from = static_cast<const char*>(memory_) + kLogOffset;
  if (runtime.copy(&words_->log, from, sizeof(CallLog), log_stream_)) return std::nullopt;
  const auto deadline = SetUpClock::now() + kLogPatience;
  std::string why;
  for (;;) {
    const StreamState state = runtime.query(log_stream_, &why);
    if (state == StreamState::kDone) return words_->log;
    if (state == StreamState::kFailed || SetUpClock::now() >= deadline) return std::nullopt;
    std::this_thread::sleep_for(kLogPause);
  }
}

std::vector<StatsRow> Seat::stats(bool reset) {
  std::lock_guard<std::mutex> lock(log_mutex_);
  std::vector<StatsRow> rows;
  const std::optional<CallLog> now = log();
  if (!now) return rows;
  for (size_t i = 1; i < sites_.size(); ++i) {
    const int64_t count = static_cast<int64_t>(now->ended_at[i] - counted_.ended_at[i]);
    if (count == 0) continue;
    const Traffic& traffic = sites_[i].traffic;
    rows.push_back({sites_[i].collective, traffic.algorithm, transport(), key_, count,
                    count * traffic.bytes_sent, count * traffic.bytes_received, 0});
  }
  if (reset) counted_ = *now;
  return rows;
}

std::optional<LastCall> Seat::last_call() {
  std::optional<Error> error = failure();
  std::lock_guard<std::mutex> lock(log_mutex_);
  const std::optional<CallLog> now = log();
  if (!now || now->begun == 0) return std::nullopt;
  LastCall last;
  last.number = now->begun - 1;
  if (now->site < sites_.size()) last.site = sites_[now->site];
  last.outcome = now->ended == now->begun ? "done" : error ? std::string(name_of(error->kind)) : "";
  return last;
}

// The host zeroes the word, so that the next long wait is news again.
std::optional<std::string> Seat::stall() {
  const uint64_t status = __atomic_exchange_n(&words_->stalled, uint64_t{0}, __ATOMIC_ACQ_REL);
  if (status == 0 || retired()) return std::nullopt;
  const int peer = rank_of_peer(peer_in(status));
  const Site known = site(site_in(status));
  return "communicator " + key_ + ": " + (known.label.empty() ? "a collective" : known.label) +
         " on the GPU of rank " + std::to_string(rank_) + " has waited " +
         std::to_string(std::lround(settings().warn_s.load())) + " s: missing " +
         (peer < static_cast<int>(cards_.size()) ? describe(cards_[peer])
                                                 : "rank " + std::to_string(peer));
}

}  // namespace jaxring::cuda
