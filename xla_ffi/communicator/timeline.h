// What the setting `timeline` collects: each operation as it ends, until Python's writer fetches it
// (jaxring/_src/timeline_writer.py). Off, it costs a load of `settings().timeline`.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "xla_ffi/communicator/flight_recorder.h"

namespace jaxring {

struct TimelineRow {
  std::string communicator;
  FlightEntry entry;
  Algorithm algorithm = Algorithm::kAuto;  // kAuto: it ended before one was chosen
  // When each channel of a schedule was through; empty: one thread did it all, until
  // `entry.finished`.
  std::vector<Clock::time_point> channel_ends;
};

class Timeline {
 public:
  // Never destroyed: XLA's threads may outlive static destruction.
  static Timeline& instance() {
    static Timeline& timeline = *new Timeline;
    return timeline;
  }

  void add(TimelineRow row) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (rows_.size() < kMostRows) {
      rows_.push_back(std::move(row));
    } else {
      ++dropped_;
    }
  }

  // (the rows since the last call, how many found no room)
  std::pair<std::vector<TimelineRow>, int64_t> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return {std::exchange(rows_, {}), std::exchange(dropped_, 0)};
  }

 private:
  // The writer comes twice a second; at 300 bytes a row these are 60 MB.
  static constexpr size_t kMostRows = 200'000;
  Timeline() = default;

  std::mutex mutex_;
  std::vector<TimelineRow> rows_;
  int64_t dropped_ = 0;
};

}  // namespace jaxring
