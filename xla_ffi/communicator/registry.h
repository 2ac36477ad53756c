// All communicators of this process, by key.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/communicator/communicator.h"

namespace jaxring {

class Registry {
 public:
  // Never destroyed: XLA's threads may outlive static destruction.
  static Registry& instance();

  std::shared_ptr<Communicator> find(const std::string& key) const;
  // The existing one if there is one with the same ranks; a closed one is replaced.
  std::shared_ptr<Communicator> create(const CommunicatorSpec& spec);
  // For calls lowered elsewhere (a serialized executable): a communicator whose ranks are all here.
  std::shared_ptr<Communicator> find_or_create_local(const std::string& key, int world_size);
  void close(const std::string& key);
  // When the process ends; with a reason, all ranks raise it.
  void close_all(const std::string& reason = "");

  std::vector<StatsRow> stats(bool reset);
  // The remembered operations of all ranks of this process, by communicator.
  std::vector<std::pair<std::string, std::vector<FlightEntry>>> flight() const;

  // Errors pass through XLA as text; this remembers the recent ones, so that the typed one can be
  // had again.
  void remember(const Error& error);
  std::optional<Error> recall(const std::string& message) const;

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
  std::vector<std::pair<std::string, std::vector<FlightEntry>>> closed_flight_;  // of the last few
  std::vector<StatsRow> closed_stats_;  // what closed communicators had counted
  std::deque<Error> recent_errors_;
};

}  // namespace jaxring
