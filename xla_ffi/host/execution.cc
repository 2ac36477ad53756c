#include "xla_ffi/host/execution.h"

#include <algorithm>
#include <thread>

namespace jaxring {

ScheduledExecution::ScheduledExecution(std::vector<Input> inputs, std::vector<Output> outputs)
    : inputs_(std::move(inputs)), outputs_(std::move(outputs)) {}

bool ScheduledExecution::work(int /*worker*/) {
  bool moved = false;
  for (const auto& pipeline : pipelines_) {
    if (pipeline->busy.test_and_set(std::memory_order_acquire)) continue;
    if (!pipeline->finished()) {
      moved |= pipeline->advance();
      if (pipeline->finished()) {
        pipeline->ended = std::chrono::steady_clock::now();
        finished_pipelines_.fetch_add(1, std::memory_order_acq_rel);
      }
    }
    pipeline->busy.clear(std::memory_order_release);
  }
  return moved;
}

bool ScheduledExecution::finished() const {
  return finished_pipelines_.load(std::memory_order_acquire) == static_cast<int>(pipelines_.size());
}

void ScheduledExecution::retire() {
  for (const auto& pipeline : pipelines_) {
    while (pipeline->busy.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  }  // the flags stay set: nobody enters again
}

Traffic ScheduledExecution::traffic(int rank) const {
  Traffic total;
  for (const auto& pipeline : pipelines_) {
    if (pipeline->rank() != rank) continue;
    total.bytes_sent += pipeline->traffic().bytes_sent;
    total.bytes_received += pipeline->traffic().bytes_received;
  }
  return total;
}

std::vector<std::chrono::steady_clock::time_point> ScheduledExecution::channel_ends(
    int rank) const {
  std::vector<std::chrono::steady_clock::time_point> ends;
  for (const auto& pipeline : pipelines_) {
    if (pipeline->rank() == rank) ends.push_back(pipeline->ended);
  }
  return ends;
}

std::vector<int> ScheduledExecution::blocking_peers() {
  std::vector<int> peers;
  for (const auto& pipeline : pipelines_) {
    if (pipeline->busy.test_and_set(std::memory_order_acquire)) continue;
    for (int peer : pipeline->blocking_peers()) peers.push_back(peer);
    pipeline->busy.clear(std::memory_order_release);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

}  // namespace jaxring
