#include "xla_ffi/communicator/registry.h"

#include <algorithm>
#include <stdexcept>

#include "xla_ffi/communicator/forked.h"

namespace jaxring {

Registry& Registry::instance() {
  static Registry& registry = *new Registry;
  watch_forks();
  return registry;
}

std::shared_ptr<Communicator> Registry::find(const std::string& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = communicators_.find(key);
  return found == communicators_.end() ? nullptr : found->second;
}

std::shared_ptr<Communicator> Registry::create(const CommunicatorSpec& spec) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::shared_ptr<Communicator>& communicator = communicators_[spec.key];
  if (!communicator) communicator = std::make_shared<Communicator>(spec);
  if (communicator->spec().world_size() != spec.world_size()) {
    throw std::invalid_argument("communicator " + spec.key + " exists with world size " +
                                std::to_string(communicator->spec().world_size()) + ", not " +
                                std::to_string(spec.world_size()) + "; close it first");
  }
  return communicator;
}

std::shared_ptr<Communicator> Registry::find_or_create_local(const std::string& key,
                                                             int world_size) {
  CommunicatorSpec spec;
  spec.key = key;
  spec.processes.assign(world_size, 0);
  return create(spec);
}

void Registry::close(const std::string& key) {
  if (forked()) return;
  std::shared_ptr<Communicator> communicator;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = communicators_.find(key);
    if (found == communicators_.end()) return;
    communicator = found->second;
    communicators_.erase(found);
    for (StatsRow& row : communicator->stats(true)) closed_stats_.push_back(std::move(row));
    constexpr size_t kRememberedFlights = 4;
    closed_flight_.emplace_back(key, communicator->flight());
    if (closed_flight_.size() > kRememberedFlights) closed_flight_.erase(closed_flight_.begin());
  }
  communicator->close();
}

void Registry::close_all(const std::string& reason) {
  if (forked()) return;
  std::map<std::string, std::shared_ptr<Communicator>> open;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    open = communicators_;
  }
  for (const auto& entry : open) {
    // Without other processes there is nobody to tell, and a launched step's last ranks still come.
    if (reason.empty() || !entry.second->spans_processes()) {
      entry.second->linger(std::chrono::seconds(5), true);
    } else {
      entry.second->abort(reason);
    }
  }
  for (const auto& entry : open) close(entry.first);
}

std::vector<StatsRow> Registry::stats(bool reset) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StatsRow> rows = closed_stats_;
  if (reset) closed_stats_.clear();
  for (const auto& entry : communicators_) {
    for (StatsRow& row : entry.second->stats(reset)) rows.push_back(std::move(row));
  }
  return rows;
}

std::vector<std::pair<std::string, std::vector<FlightEntry>>> Registry::flight() const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto all = closed_flight_;
  for (const auto& [key, communicator] : communicators_) {
    all.emplace_back(key, communicator->flight());
  }
  return all;
}

void Registry::remember(const Error& error) {
  constexpr size_t kRemembered = 64;
  std::lock_guard<std::mutex> lock(mutex_);
  recent_errors_.push_back(error);
  if (recent_errors_.size() > kRemembered) recent_errors_.pop_front();
}

std::optional<Error> Registry::recall(const std::string& message) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = std::find_if(recent_errors_.rbegin(), recent_errors_.rend(),
                            [&](const Error& error) { return error.message == message; });
  if (found == recent_errors_.rend()) return std::nullopt;
  return *found;
}

}  // namespace jaxring
