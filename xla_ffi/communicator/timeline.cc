#include "xla_ffi/communicator/timeline.h"

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/settings.h"

namespace jaxring {

// A rank's operation has ended: for the flight record, and for the timeline where that is wanted.
// Under mutex_.
void Communicator::record_end(int rank, const Key& key, const Ending& ending) {
  const FlightEntry* entry = flight_.finished(rank, key, ending.ready, ending.now, ending.outcome);
  if (entry == nullptr || !settings().timeline.load(std::memory_order_relaxed)) return;
  TimelineRow row{spec_.key, *entry, ending.algorithm, {}};
  if (ending.execution != nullptr) row.channel_ends = ending.execution->channel_ends(rank);
  Timeline::instance().add(std::move(row));
}

}  // namespace jaxring
