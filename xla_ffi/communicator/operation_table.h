// Operations that are under way on one communicator, by key: who has announced what.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "xla_ffi/communicator/request.h"
#include "xla_ffi/host/execution.h"

namespace jaxring {

struct PendingOperation {
  explicit PendingOperation(Key k, int world_size)
      : key(k), announced(world_size), tickets(world_size), payloads(world_size) {}

  const Key key;
  std::vector<std::optional<uint64_t>> announced;  // signature hash by rank
  int announced_count = 0;
  std::vector<std::shared_ptr<Ticket>> tickets;  // by rank; null for ranks of other processes
  int ticket_count = 0;
  std::vector<std::vector<char>> payloads;  // by rank; what came with announcements
  bool ordered = false;                     // the leader has put it in the communicator's order
  bool finished = false;
  bool failed = false;
  std::unique_ptr<Execution> execution;  // once it has started
  Algorithm algorithm = Algorithm::kAuto;
  Clock::time_point ready;     // when the last rank announced
  Clock::time_point deadline;  // from the first ticket on
  bool warned = false;

  const std::shared_ptr<Ticket>& first_ticket() const {
    for (const auto& ticket : tickets) {
      if (ticket) return ticket;
    }
    return tickets.front();
  }

  std::vector<int> missing_ranks() const {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < announced.size(); ++rank) {
      if (!announced[rank]) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
  }

  // Whether the ranks that have announced agree on what they are doing.
  bool signatures_agree() const {
    std::optional<uint64_t> first;
    for (const auto& hash : announced) {
      if (!hash) continue;
      if (first && *first != *hash) return false;
      first = hash;
    }
    return true;
  }
};

using OperationTable = std::unordered_map<Key, std::shared_ptr<PendingOperation>, KeyHash>;

}  // namespace jaxring
