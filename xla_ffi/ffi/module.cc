// jaxring._native: what Python sees of the engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "xla_ffi/communicator/interrupt.h"
#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/core/text.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/error_details.h"
#include "xla_ffi/ffi/handlers.h"
#include "xla_ffi/ffi/module.h"
#include "xla_ffi/ffi/module_parts.h"
#include "xla_ffi/host/round_trip.h"

namespace nb = nanobind;

namespace jaxring {
namespace {

// Typed errors cross into Python as text; jaxring.errors.from_exception makes them typed again.
[[noreturn]] void raise(const Error& error) {
  Registry::instance().remember(error);
  throw std::runtime_error(error.text());
}

[[noreturn]] void raise(ErrorKind kind, std::string message) {
  Error error;
  error.kind = kind;
  error.message = std::move(message);
  raise(error);
}

std::shared_ptr<Communicator> get(const std::string& key) {
  std::shared_ptr<Communicator> communicator = Registry::instance().find(key);
  if (!communicator) {
    raise(ErrorKind::kUsageError, "there is no communicator " + key + " in this process");
  }
  return communicator;
}

std::string state_of(Communicator& communicator) {
  if (std::optional<Error> error = communicator.broken_anywhere()) {
    Registry::instance().remember(*error);  // Python may raise it
    return "broken: " + error->text();
  }
  return communicator.all_attached() ? "ready" : "connecting";
}

nb::dict lists() {
  nb::dict result;
  nb::list collectives, ops, dtypes, algorithms, transports, error_kinds;
#define JR_X(enumerator, name, reduces) collectives.append(name);
  JR_FOR_EACH_COLLECTIVE(JR_X)
#undef JR_X
#define JR_X(enumerator, name, functor) ops.append(name);
  JR_FOR_EACH_REDUCE_OP(JR_X)
#undef JR_X
#define JR_X(enumerator, name, storage, accumulator) dtypes.append(name);
  JR_FOR_EACH_DTYPE(JR_X)
#undef JR_X
  for (const AlgorithmInfo& info : kAlgorithms) {
    nb::dict entry;
    entry["name"] = std::string(info.name);
    entry["rank_order"] = info.rank_order;
    nb::list served;
#define JR_X(enumerator, name, reduces) \
  if (serves(info.algorithm, Collective::enumerator)) served.append(name);
    JR_FOR_EACH_COLLECTIVE(JR_X)
#undef JR_X
    entry["collectives"] = served;
    entry["summary"] = std::string(info.summary);
    algorithms.append(entry);
  }
#define JR_X(enumerator, name_, summary_) \
  {                                       \
    nb::dict entry;                       \
    entry["name"] = name_;                \
    entry["summary"] = summary_;          \
    transports.append(entry);             \
  }
  JR_FOR_EACH_TRANSPORT(JR_X)
#undef JR_X
#define JR_X(name) error_kinds.append(#name);
  JR_ERROR_KINDS(JR_X)
#undef JR_X
  result["collectives"] = collectives;
  result["ops"] = ops;
  result["dtypes"] = dtypes;
  result["algorithms"] = algorithms;
  result["transports"] = transports;
  result["error_kinds"] = error_kinds;
  return result;
}

bool supports_by_name(const std::string& op, const std::string& dtype) {
  const std::optional<ReduceOp> known_op = reduce_op_from_name(op);
  const std::optional<DType> known_dtype = dtype_from_name(dtype);
  return known_op && known_dtype && supports(*known_op, *known_dtype);
}

void set_setting(const std::string& name, double value) {
  if (set_run_time_setting(name, value)) return;
  raise(ErrorKind::kUsageError, "'" + name + "' is not a run-time setting of the engine");
}

std::string create_communicator(const std::string& key, std::vector<int> processes,
                                int self_process) {
  CommunicatorSpec spec;
  spec.key = key;
  spec.processes = std::move(processes);
  spec.self_process = self_process;
  return state_of(*Registry::instance().create(spec));
}

std::string communicator_state(const std::string& key) {
  std::shared_ptr<Communicator> communicator = Registry::instance().find(key);
  return communicator ? state_of(*communicator) : "missing";
}

std::string segment_publish(const std::string& key) {
  std::shared_ptr<Communicator> communicator = get(key);
  std::shared_ptr<Segment> segment =
      Segment::create(communicator->process_count(), communicator->spec().world_size());
  std::string address = segment->address();
  communicator->attach(std::move(segment));
  return address;
}

void segment_attach(const std::string& key, const std::string& address) {
  std::shared_ptr<Communicator> communicator = get(key);
  communicator->attach(
      Segment::attach(address, communicator->process_count(), communicator->spec().world_size()));
}

// Both take one entry for each rank.
std::string links_listen(const std::string& key, const std::vector<int>& hosts,
                         const std::string& provider, const std::string& interface,
                         const std::string& secret) {
  return get(key)->listen(hosts, provider, interface, secret);
}

void links_connect(const std::string& key, const std::vector<std::string>& addresses) {
  nb::gil_scoped_release release;
  get(key)->connect(addresses);
}

// `waited_s`: how long the caller has waited before, for the error.
void wait_ready(const std::string& key, double timeout_s, double waited_s) {
  nb::gil_scoped_release release;
  std::shared_ptr<Communicator> communicator = get(key);
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  Clock::time_point next_look = Clock::now() + std::chrono::milliseconds(50);
  while (!communicator->all_attached()) {
    if (Clock::now() >= next_look) {  // Ctrl-C
      nb::gil_scoped_acquire acquire;
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
      next_look = Clock::now() + std::chrono::milliseconds(50);
    }
    if (std::optional<Error> error = communicator->broken()) raise(*error);
    if (Clock::now() >= deadline) {
      Error error = communicator->not_attached_error(waited_s + timeout_s);
      raise(error);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void fail_communicator(const std::string& key, const std::string& kind,
                       const std::string& message) {
  const std::optional<ErrorKind> known = error_kind_from_name(kind);
  if (!known) raise(ErrorKind::kUsageError, "'" + kind + "' is not an error kind");
  Error error;
  error.kind = *known;
  error.message = on_one_line(message);
  nb::gil_scoped_release release;
  get(key)->fail(std::move(error));
}

void abort_communicator(const std::string& key, const std::string& reason) {
  nb::gil_scoped_release release;
  get(key)->abort(reason);
}

// Runs Python's handlers of the signals that have come, and gives `f` what they raise, or None.
nb::object after_signals(nb::callable f, nb::args args) {
  nb::object raised = nb::none();
  if (PyErr_CheckSignals() != 0) {
    const nb::python_error error;
    raised = nb::borrow(error.value());
  }
  return f(raised, *args);
}

}  // namespace
}  // namespace jaxring

NB_MODULE(_native, m) {
  using namespace jaxring;  // NOLINT: the module's own namespace
  m.doc() = "jaxring's engine. Internal: use the public names of the package jaxring.";
  m.def("lists", &lists, "The one list of each fact: collectives, ops, dtypes, algorithms, …");
  m.def("supports", &supports_by_name, nb::arg("op"), nb::arg("dtype"),
        "Whether the op has a meaning for the dtype.");
  m.def("cpu_level", &cpu_level, "The instruction-set level of the reduction kernels in use.");
  m.def(
      "cache_line_round_trip_ns",
      [] {
        nb::gil_scoped_release release;
        return cache_line_round_trip_ns();
      },
      "Nanoseconds in which two cores hand a cache line to and fro; 0 with one core.");
  m.def("ffi_registrations", [] {
    nb::dict all =
        registrations_of({{"instantiate", jaxring_instantiate}, {"execute", jaxring_execute}});
    nb::dict place;
    place["execute"] = nb::capsule(reinterpret_cast<void*>(jaxring_place));
    all["jaxring_place"] = place;
    return all;
  });
  m.def("ffi_types", [] { return types_of<CallSite>("jaxring_call_site"); });
  m.def("set_setting", &set_setting, nb::arg("name"), nb::arg("value"));
  m.def("create_communicator", &create_communicator, nb::arg("key"), nb::arg("processes"),
        nb::arg("self_process"));
  m.def("communicator_state", &communicator_state, nb::arg("key"));
  m.def("segment_publish", &segment_publish, nb::arg("key"));
  m.def("segment_attach", &segment_attach, nb::arg("key"), nb::arg("address"));
  m.def("links_listen", &links_listen, nb::arg("key"), nb::arg("hosts"), nb::arg("provider"),
        nb::arg("interface"), nb::arg("secret"),
        "Before the segment is there: listens for other hosts; the address for links_connect.");
  m.def("links_connect", &links_connect, nb::arg("key"), nb::arg("addresses"));
  m.def("wait_ready", &wait_ready, nb::arg("key"), nb::arg("timeout_s"), nb::arg("waited_s") = 0.0);
  m.def("fail_communicator", &fail_communicator, nb::arg("key"), nb::arg("kind"),
        nb::arg("message"));
  m.def("abort_communicator", &abort_communicator, nb::arg("key"), nb::arg("reason"));
  m.def(
      "close_communicator",
      [](const std::string& key) {
        nb::gil_scoped_release release;
        Registry::instance().close(key);
      },
      nb::arg("key"));
  m.def(
      "close_all",
      [](const std::string& reason) {
        nb::gil_scoped_release release;
        Registry::instance().close_all(reason);
      },
      nb::arg("reason") = "", "With a reason, all ranks of all communicators raise it.");
  m.def(
      "stats", [](bool reset) { return rows_of(Registry::instance().stats(reset), true); },
      nb::arg("reset") = false);
  bind_records(m);
  bind_events(m);
  m.def("install_interrupt_handler", &install_interrupt_handler);
  m.def("install_dump_handler", &install_dump_handler, nb::arg("signal"));
  m.def("after_signals", &after_signals, nb::arg("f"), nb::arg("args"));
  m.def("error_details", &error_details, nb::arg("message"));
  bind_simulation(m);
}
