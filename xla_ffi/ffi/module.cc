// jaxring._native: what Python sees of the engine.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/ffi/call_site.h"
#include "xla_ffi/ffi/handlers.h"

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

std::string state_of(const Communicator& communicator) {
  if (std::optional<Error> error = communicator.broken()) return "broken: " + error->text();
  return communicator.all_attached() ? "ready" : "connecting";
}

nb::dict lists() {
  nb::dict result;
  nb::list collectives, ops, dtypes, algorithms, transports, error_kinds;
#define JR_X(enumerator, name) collectives.append(name);
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

nb::dict ffi_registrations() {
  nb::dict stages;
  stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(jaxring_instantiate));
  stages["execute"] = nb::capsule(reinterpret_cast<void*>(jaxring_execute));
  nb::dict result;
  result["jaxring_collective"] = stages;
  return result;
}

nb::dict ffi_types() {
  static XLA_FFI_TypeInfo type_info = xla::ffi::MakeTypeInfo<CallSite>();
  nb::dict type;
  type["type_id"] = nb::capsule(&CallSite::id);
  type["type_info"] = nb::capsule(&type_info);
  nb::dict result;
  result["jaxring_call_site"] = type;
  return result;
}

void set_setting(const std::string& name, double value) {
  if (name == "timeout_s") {
    settings().timeout_s = value;
  } else if (name == "warn_s") {
    settings().warn_s = value;
  } else {
    raise(ErrorKind::kUsageError, "'" + name + "' is not a run-time setting of the engine");
  }
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

void wait_ready(const std::string& key, double timeout_s) {
  nb::gil_scoped_release release;
  std::shared_ptr<Communicator> communicator = get(key);
  const auto deadline = Clock::now() + std::chrono::duration<double>(timeout_s);
  while (!communicator->all_attached()) {
    if (std::optional<Error> error = communicator->broken()) raise(*error);
    if (Clock::now() >= deadline) {
      Error error = communicator->not_attached_error(timeout_s);
      raise(error);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void fail_communicator(const std::string& key, const std::string& kind,
                       const std::string& message) {
  Error error;
  error.message = message;
  bool known = false;
#define JR_X(name)                   \
  if (kind == #name) {               \
    error.kind = ErrorKind::k##name; \
    known = true;                    \
  }
  JR_ERROR_KINDS(JR_X)
#undef JR_X
  if (!known) raise(ErrorKind::kUsageError, "'" + kind + "' is not an error kind");
  nb::gil_scoped_release release;
  get(key)->fail(std::move(error));
}

void abort_communicator(const std::string& key, const std::string& reason) {
  fail_communicator(key, "AbortedError", reason);
}

nb::list stats(bool reset) {
  nb::list rows;
  for (const StatsRow& row : Registry::instance().stats(reset)) {
    nb::dict entry;
    entry["collective"] = row.collective;
    entry["algorithm"] = row.algorithm;
    entry["transport"] = row.transport;
    entry["communicator"] = row.communicator;
    entry["operations"] = row.operations;
    entry["bytes_sent"] = row.bytes_sent;
    entry["bytes_received"] = row.bytes_received;
    entry["wait_s"] = row.wait_s;
    rows.append(entry);
  }
  return rows;
}

nb::object error_details(const std::string& message) {
  const std::optional<Error> error = Registry::instance().recall(message);
  if (!error) return nb::none();
  nb::dict details;
  details["kind"] = std::string(name_of(error->kind));
  details["missing_ranks"] = error->missing_ranks;
  details["rank"] = error->rank >= 0 ? nb::object(nb::int_(error->rank)) : nb::none();
  details["host"] = error->host.empty() ? nb::none() : nb::object(nb::str(error->host.c_str()));
  details["pid"] = error->pid > 0 ? nb::object(nb::int_(error->pid)) : nb::none();
  details["call"] = error->call.empty() ? nb::none() : nb::object(nb::str(error->call.c_str()));
  details["sequence"] = error->sequence >= 0 ? nb::object(nb::int_(error->sequence)) : nb::none();
  details["signatures"] = error->signatures;
  return details;
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
  m.def("ffi_registrations", &ffi_registrations);
  m.def("ffi_types", &ffi_types);
  m.def("set_setting", &set_setting, nb::arg("name"), nb::arg("value"));
  m.def("create_communicator", &create_communicator, nb::arg("key"), nb::arg("processes"),
        nb::arg("self_process"));
  m.def("communicator_state", &communicator_state, nb::arg("key"));
  m.def("segment_publish", &segment_publish, nb::arg("key"));
  m.def("segment_attach", &segment_attach, nb::arg("key"), nb::arg("address"));
  m.def("wait_ready", &wait_ready, nb::arg("key"), nb::arg("timeout_s"));
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
  m.def("close_all", [] {
    nb::gil_scoped_release release;
    Registry::instance().close_all();
  });
  m.def("stats", &stats, nb::arg("reset") = false);
  m.def("error_details", &error_details, nb::arg("message"));
}
