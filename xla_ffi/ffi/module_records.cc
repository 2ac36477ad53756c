// What the engine remembers of operations: the flight record, and the rows of the timeline.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/communicator/timeline.h"
#include "xla_ffi/ffi/module.h"

namespace nb = nanobind;

namespace jaxring {
namespace {

// Seconds since the epoch, or None for a moment that has not come.
nb::object wall_time_s(Clock::time_point moment) {
  if (moment == Clock::time_point{}) return nb::none();
  const auto ago = Clock::now() - moment;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return nb::float_(std::chrono::duration<double>(now - ago).count());
}

// Nanoseconds of CLOCK_MONOTONIC, as Python's time.monotonic_ns() has it; 0: it has not come.
int64_t monotonic_ns(Clock::time_point moment) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(moment.time_since_epoch()).count();
}

nb::dict what_it_was(const std::string& communicator, const FlightEntry& entry) {
  nb::dict row;
  row["communicator"] = communicator;
  row["rank"] = entry.rank;
  row["number"] = entry.number;
  row["launch"] = entry.key.launch;
  row["call"] = entry.key.call;
  row["copy"] = entry.key.copy;
  row["iteration"] = entry.key.iteration;
  row["name"] = entry.info->name;
  row["signature"] = entry.info->signature.text;
  row["outcome"] = entry.outcome;
  return row;
}

nb::list flight_record() {
  nb::list rows;
  for (const auto& [communicator, entries] : Registry::instance().flight()) {
    for (const FlightEntry& entry : entries) {
      nb::dict row = what_it_was(communicator, entry);
      row["arrived_s"] = wall_time_s(entry.arrived);
      row["ready_s"] = wall_time_s(entry.ready);
      row["finished_s"] = wall_time_s(entry.finished);
      rows.append(row);
    }
  }
  return rows;
}

nb::tuple timeline_rows() {
  auto [taken, dropped] = Timeline::instance().take();
  nb::list rows;
  for (const TimelineRow& one : taken) {
    nb::dict row = what_it_was(one.communicator, one.entry);
    row["collective"] = std::string(name_of(one.entry.info->collective));
    row["algorithm"] = std::string(info_of(one.algorithm).name);
    row["arrived_ns"] = monotonic_ns(one.entry.arrived);
    row["ready_ns"] = monotonic_ns(one.entry.ready);
    row["finished_ns"] = monotonic_ns(one.entry.finished);
    nb::list ends;
    for (const Clock::time_point end : one.channel_ends) ends.append(monotonic_ns(end));
    row["channel_ends_ns"] = ends;
    rows.append(row);
  }
  return nb::make_tuple(rows, dropped);
}

}  // namespace

void bind_records(nb::module_& m) {
  m.def("flight_record", &flight_record, "The last operations of each rank of this process.");
  m.def("timeline_rows", &timeline_rows,
        "(operations that ended since the last call, how many were lost), with the setting "
        "timeline.");
}

}  // namespace jaxring
