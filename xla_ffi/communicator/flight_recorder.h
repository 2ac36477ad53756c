// The last operations of each rank of a communicator, for a post-mortem: what every rank had done
// when one of them stopped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "xla_ffi/communicator/request.h"
#include "xla_ffi/host/execution.h"

namespace jaxring {

struct FlightEntry {
  uint64_t number = 0;  // of this rank's operations on the communicator, from 0
  int rank = 0;
  Key key;
  std::shared_ptr<const CallInfo> info;
  Clock::time_point arrived;
  Clock::time_point ready;     // when all ranks had announced it; zero: they have not
  Clock::time_point finished;  // zero: it is under way
  std::string outcome;         // "", "done", or the kind of error
};

// How a rank's operation ended.
struct Ending {
  Algorithm algorithm;  // kAuto: before one was chosen
  Clock::time_point ready, now;
  std::string_view outcome;
  const Execution* execution;  // of a finished one that had channels, else null
};

// Not thread-safe: its communicator's mutex guards it.
class FlightRecorder {
 public:
  static constexpr size_t kEntriesPerRank = 1000;

  explicit FlightRecorder(int world_size) : ranks_(world_size) {}

  void arrived(int rank, const Key& key, const std::shared_ptr<const CallInfo>& info,
               Clock::time_point now) {
    FlightEntry& entry = next_entry(rank);
    entry.key = key;
    if (entry.info != info) entry.info = info;
    entry.arrived = now;
    entry.ready = entry.finished = Clock::time_point{};
    entry.outcome.clear();
  }

  // The entry, if it is remembered.
  const FlightEntry* finished(int rank, const Key& key, Clock::time_point ready,
                              Clock::time_point now, std::string_view outcome) {
    Rank& of = ranks_[rank];
    // Few are under way at once, and these are the latest.
    for (size_t back = 0; back < of.entries.size(); ++back) {
      FlightEntry& entry = of.from_newest(back);
      if (!(entry.key == key)) continue;
      entry.ready = ready;
      entry.finished = now;
      entry.outcome = outcome;
      return &entry;
    }
    return nullptr;
  }

  std::vector<FlightEntry> entries() const {
    std::vector<FlightEntry> all;
    for (const Rank& rank : ranks_) {
      for (size_t back = rank.entries.size(); back-- > 0;) all.push_back(rank.from_newest(back));
    }
    return all;
  }

  // The last operation that the rank has finished without an error, if it is remembered.
  const FlightEntry* last_done(int rank) const {
    const Rank& of = ranks_[rank];
    for (size_t back = 0; back < of.entries.size(); ++back) {
      const FlightEntry& entry = of.from_newest(back);
      if (entry.outcome == "done") return &entry;
    }
    return nullptr;
  }

 private:
  // A ring: an entry is written over the oldest one, so that recording allocates nothing.
  struct Rank {
    std::vector<FlightEntry> entries;
    uint64_t next = 0;

    const FlightEntry& from_newest(size_t back) const {
      return entries[(next - 1 - back) % kEntriesPerRank];
    }
    FlightEntry& from_newest(size_t back) { return entries[(next - 1 - back) % kEntriesPerRank]; }
  };

  FlightEntry& next_entry(int rank) {
    Rank& of = ranks_[rank];
    if (of.entries.size() < kEntriesPerRank) of.entries.emplace_back();
    FlightEntry& entry = of.entries[of.next % kEntriesPerRank];
    entry.number = of.next++;
    entry.rank = rank;
    return entry;
  }

  std::vector<Rank> ranks_;
};

}  // namespace jaxring
