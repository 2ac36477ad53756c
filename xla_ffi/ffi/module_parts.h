// What both Python modules have, jaxring._native and jaxring._cuda: each has an engine of its own
// in it, and so its own settings, events and counters.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/communicator/events.h"
#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/communicator/stats.h"
#include "xla_ffi/core/error.h"

namespace jaxring {

// The handlers of the custom call, by stage, as jax.ffi.register_ffi_target takes them.
inline nanobind::dict registrations_of(
    std::initializer_list<std::pair<const char*, XLA_FFI_Handler*>> stages) {
  nanobind::dict by_stage;
  for (const auto& [stage, handler] : stages) {
    by_stage[stage] = nanobind::capsule(reinterpret_cast<void*>(handler));
  }
  nanobind::dict result;
  result["jaxring_collective"] = by_stage;
  return result;
}

// The type of a handler's state, as jax.ffi.register_ffi_type takes it.
template <class State>
nanobind::dict types_of(const char* name) {
  static XLA_FFI_TypeInfo type_info = xla::ffi::MakeTypeInfo<State>();
  nanobind::dict type;
  type["type_id"] = nanobind::capsule(&State::id);
  type["type_info"] = nanobind::capsule(&type_info);
  nanobind::dict result;
  result[name] = type;
  return result;
}

// Whether the engine has a run-time setting of this name.
inline bool set_run_time_setting(const std::string& name, double value) {
  if (name == "timeout_s") {
    settings().timeout_s = value;
  } else if (name == "warn_s") {
    settings().warn_s = value;
  } else if (name == "timeline") {
    settings().timeline = value != 0;
  } else {
    return false;
  }
  return true;
}

inline std::optional<ErrorKind> error_kind_from_name(const std::string& name) {
#define JR_X(kind) \
  if (name == #kind) return ErrorKind::k##kind;
  JR_ERROR_KINDS(JR_X)
#undef JR_X
  return std::nullopt;
}

// Releases the GIL while it waits.
inline nanobind::object next_event(double timeout_s) {
  std::optional<Event> event;
  {
    nanobind::gil_scoped_release release;
    event = Events::instance().next(timeout_s);
  }
  if (!event) return nanobind::none();
  nanobind::dict result;
  result["kind"] = event->kind;
  result["text"] = event->text;
  return result;
}

inline void bind_events(nanobind::module_& m) {
  m.def("next_event", &next_event, nanobind::arg("timeout_s"),
        "What the engine has to tell an operator, or None when nothing came in time.");
  m.def("stop_events", [] { Events::instance().stop(); }, "Ends the wait of next_event.");
}

// `wait_s` is None where nobody has measured it.
inline nanobind::list rows_of(const std::vector<StatsRow>& stats, bool has_waits) {
  nanobind::list rows;
  for (const StatsRow& row : stats) {
    nanobind::dict entry;
    entry["collective"] = row.collective;
    entry["algorithm"] = row.algorithm;
    entry["transport"] = row.transport;
    entry["communicator"] = row.communicator;
    entry["operations"] = row.operations;
    entry["bytes_sent"] = row.bytes_sent;
    entry["bytes_received"] = row.bytes_received;
    entry["wait_s"] = has_waits ? nanobind::cast(row.wait_s) : nanobind::none();
    rows.append(entry);
  }
  return rows;
}

}  // namespace jaxring
