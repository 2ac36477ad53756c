// Operations that are under way on one communicator, by key: who has announced what.
#pragma once

#include <map>
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
  uint64_t first_signature = 0;
  bool disputed = false;                         // signatures differ
  std::vector<std::shared_ptr<Ticket>> tickets;  // by rank; null for ranks of other processes
  int ticket_count = 0;
  std::vector<std::vector<char>> payloads;  // by rank; what came with announcements
  bool ordered = false;                     // the leader has put it in the communicator's order
  bool finished = false;
  std::unique_ptr<Execution> execution;  // once it has started
  Algorithm algorithm = Algorithm::kAuto;
  Clock::time_point ready;     // when the last rank announced
  Clock::time_point deadline;  // from the first ticket on
  bool warned = false;
  bool told_waits = false;                // see roll_call.cc
  std::map<int, std::vector<int>> waits;  // by process: whom its ranks wait for
  bool watched = false;                   // for Ctrl-C

  const std::shared_ptr<Ticket>& first_ticket() const {
    for (const auto& ticket : tickets) {
      if (ticket) return ticket;
    }
    return tickets.front();
  }

  // What a rank called here, or if it is another process's what one of ours did; null if only other
  // processes' ranks have come.
  const CallInfo* info_of(int rank) const {
    const auto& ticket = tickets[rank] ? tickets[rank] : first_ticket();
    return ticket ? ticket->request.info.get() : nullptr;
  }

  std::vector<int> missing_ranks() const {
    std::vector<int> ranks;
    for (size_t rank = 0; rank < announced.size(); ++rank) {
      if (!announced[rank]) ranks.push_back(static_cast<int>(rank));
    }
    return ranks;
  }

  void announce(int rank, uint64_t signature) {
    if (announced_count++ == 0) first_signature = signature;
    disputed |= signature != first_signature;
    announced[rank] = signature;
  }
};

using OperationTable = std::unordered_map<Key, std::shared_ptr<PendingOperation>, KeyHash>;

}  // namespace jaxring
