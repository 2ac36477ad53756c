// Who holds an operation up that all have begun. A rank sees only its neighbours in the schedule:
// in a chain 3 waits for 2 and 2 for 1, whose process is stopped. So shortly before the deadline
// every process tells whom its ranks wait for; one that says nothing, and that others wait for, is
// it. Everything here runs under the communicator's mutex.
#include <algorithm>
#include <cstring>
#include <set>

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/settings.h"

namespace jaxring {
namespace {

// Long enough for a busy machine, and for a process that looks at its records every 50 ms.
constexpr auto kAnswerPatience = std::chrono::seconds(1);

}  // namespace

bool Communicator::roll_call_is_due(const PendingOperation& operation,
                                    Clock::time_point now) const {
  if (!spans_processes() || !operation.execution || operation.told_waits) return false;
  const auto patience = std::min<Clock::duration>(kAnswerPatience, settings().timeout() / 4);
  return now >= operation.deadline - patience;
}

void Communicator::tell_waits(PendingOperation& operation) {
  operation.told_waits = true;
  std::string payload;
  for (int rank : operation.execution->blocking_peers()) {
    const auto number = static_cast<uint16_t>(rank);
    payload.append(reinterpret_cast<const char*>(&number), sizeof number);
  }
  RecordHeader header = header_of(operation.key);
  header.type = kWaits;
  header.rank = static_cast<uint16_t>(local_ranks_.front());
  post(header, payload);
}

void Communicator::note_waits(int rank, const Key& key, const char* payload, size_t bytes) {
  auto found = table_.find(key);
  if (found == table_.end()) return;  // done here
  PendingOperation& operation = *found->second;
  std::vector<int>& peers = operation.waits[spec_.processes[rank]];
  peers.clear();
  for (size_t at = 0; at + sizeof(uint16_t) <= bytes; at += sizeof(uint16_t)) {
    uint16_t number;
    std::memcpy(&number, payload + at, sizeof number);
    if (number < spec_.world_size()) peers.push_back(number);
  }
  if (operation.execution && !operation.told_waits) tell_waits(operation);
}

// The ranks that hold it up: those of processes that have not answered, found from one to the next;
// if all that are waited for have answered, those that ours wait for.
std::vector<int> Communicator::holding_up(const PendingOperation& operation) const {
  const std::vector<int> first = operation.execution->blocking_peers();
  std::vector<int> to_ask = first;
  std::set<int> asked(first.begin(), first.end()), silent;
  while (!to_ask.empty()) {
    const int rank = to_ask.back();
    to_ask.pop_back();
    if (is_local(rank)) continue;  // ours; whom they wait for is in `first`
    auto answer = operation.waits.find(spec_.processes[rank]);
    if (answer == operation.waits.end()) {
      silent.insert(rank);
      continue;
    }
    for (int next : answer->second) {
      if (asked.insert(next).second) to_ask.push_back(next);
    }
  }
  return silent.empty() ? first : std::vector<int>(silent.begin(), silent.end());
}

}  // namespace jaxring
