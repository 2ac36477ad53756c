// jaxring._cuda: what Python sees of the GPU side. Importing it touches no driver.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "xla_ffi/cuda_ffi/call_site.h"
#include "xla_ffi/cuda_ffi/handlers.h"
#include "xla_ffi/cuda_ffi/seats.h"
#include "xla_ffi/cuda_ffi/watchdog.h"
#include "xla_ffi/ffi/error_details.h"
#include "xla_ffi/ffi/module_parts.h"

namespace nb = nanobind;

namespace jaxring::cuda {
namespace {

[[noreturn]] void raise(ErrorKind kind, const std::string& message) {
  Error error;
  error.kind = kind;
  error.message = message;
  throw std::runtime_error(error.text());
}

// CUDA's and our own errors into typed ones.
template <class F>
auto guarded(F&& f) {
  try {
    return f();
  } catch (const Failed& failed) {
    raise(failed.error.kind, failed.error.message);
  } catch (const std::exception& error) {
    raise(ErrorKind::kUsageError, error.what());
  }
}

void set_setting(const std::string& name, double value) {
  if (jaxring::set_run_time_setting(name, value)) return;
  if (name == "process") {
    module_settings().process = static_cast<int>(value);
  } else if (name == "use_cliques") {
    module_settings().use_cliques = value != 0;
  } else {
    raise(ErrorKind::kUsageError, "'" + name + "' is not a setting of jaxring._cuda");
  }
}

// The first two GPUs that cannot read each other's memory; "" if all can.
std::string unreachable_peers(int count) {
  for (int a = 0; a < count; ++a) {
    for (int b = 0; b < count; ++b) {
      bool can = false;
      const Failure failure = backend().runtime->can_access_peer(a, b, &can);
      if (failure || !can) {
        return "GPU " + std::to_string(a) + " cannot read the memory of GPU " + std::to_string(b);
      }
    }
  }
  return "";
}

std::string why_no_multicast(int count) {
  for (int device = 0; device < count; ++device) {
    if (Failure failure = multicast_unsupported(device)) return *failure;
  }
  return "";
}

// What there is of CUDA on this machine: for `jaxring info`.
nb::dict facts_of_machine() {
  nb::dict facts;
  int driver = 0, runtime = 0, count = 0;
  const Runtime& cuda = *backend().runtime;
  const Failure failure = cuda.versions(&driver, &runtime);
  facts["runtime"] = runtime;
  facts["driver"] = driver;  // 0: none
  Failure none = failure ? failure : cuda.device_count(&count);
  facts["devices"] = none ? 0 : count;
  facts["error"] = none ? *none : std::string();
  facts["peers"] = none ? std::string() : unreachable_peers(count);
  facts["multicast"] = none ? std::string() : why_no_multicast(count);
  std::string why_not;
  const Nccl* nccl = backend().nccl(&why_not);
  facts["nccl"] = nccl != nullptr ? nccl->version : 0;
  facts["nccl_reason"] = why_not;
  return facts;
}

// "" if the kernels can run such calls, else a sentence.
std::string why_not_served(const std::string& collective, const std::string& op,
                           const std::string& dtype, const std::string& algorithm,
                           bool deterministic, int world_size) {
  KernelCall call;
  const auto known_collective = collective_from_name(collective);
  const auto known_op = reduce_op_from_name(op);
  const auto known_dtype = dtype_from_name(dtype);
  const auto known_algorithm = algorithm_from_name(algorithm);
  if (!known_collective || !known_dtype || !known_algorithm) return "it is unknown on GPUs";
  // A barrier travels as the allreduce of one number.
  const bool is_barrier = *known_collective == Collective::kBarrier;
  call.collective = is_barrier ? Collective::kAllreduce : *known_collective;
  call.op = known_op.value_or(*known_dtype == DType::kBool ? ReduceOp::kOr : ReduceOp::kSum);
  call.dtype = *known_dtype;
  call.algorithm = *known_algorithm;
  call.deterministic = deterministic;
  std::fill(std::begin(call.destinations), std::end(call.destinations), -1);
  if (world_size > kMaxRanks) {
    return "it has " + std::to_string(world_size) + " ranks, and " + std::to_string(kMaxRanks) +
           " are the most";
  }
  std::string why_not;
  return backend().kernels->serves(call, world_size, &why_not) ? "" : why_not;
}

// "" if NCCL can carry such calls on its own, else a sentence.
std::string why_not_by_nccl(const std::string& collective, const std::string& op,
                            const std::string& dtype, bool deterministic) {
  const auto known_collective = collective_from_name(collective);
  const auto known_dtype = dtype_from_name(dtype);
  if (!known_collective || !known_dtype) return "it is unknown on GPUs";
  if (*known_collective == Collective::kBarrier) return "";
  KernelCall call;
  call.collective = *known_collective;
  call.op = reduce_op_from_name(op).value_or(ReduceOp::kSum);
  call.dtype = *known_dtype;
  call.deterministic = deterministic;
  std::string why_not;
  return nccl_serves(call, &why_not) ? "" : why_not;
}

// Whether these GPUs of one process can read each other's memory.
bool all_peers(const std::vector<int>& devices) {
  for (int a : devices) {
    for (int b : devices) {
      bool can = false;
      if (backend().runtime->can_access_peer(a, b, &can) || !can) return false;
    }
  }
  return true;
}

std::vector<nb::bytes> cards(const std::string& key) {
  std::vector<nb::bytes> result;
  for (const Card& card : Seats::instance().cards(key)) {
    result.emplace_back(reinterpret_cast<const char*>(&card), sizeof card);
  }
  return result;
}

std::vector<uint64_t> map(const std::string& key, const std::vector<nb::bytes>& texts) {
  std::vector<Card> cards(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].size() != sizeof(Card)) {
      raise(ErrorKind::kUsageError, "communicator " + key +
                                        ": another rank runs another version of jaxring; install "
                                        "one");
    }
    std::memcpy(&cards[i], texts[i].c_str(), sizeof(Card));
  }
  nb::gil_scoped_release release;
  return guarded([&] { return Seats::instance().map(key, cards); });
}

nb::list stats(bool reset) {
  std::vector<jaxring::StatsRow> rows;
  {
    nb::gil_scoped_release release;
    rows = Seats::instance().stats(reset);
  }
  return jaxring::rows_of(rows, false);
}

nb::list flight_record() {
  std::vector<std::pair<std::shared_ptr<Seat>, std::optional<LastCall>>> calls;
  {
    nb::gil_scoped_release release;
    for (const auto& seat : Seats::instance().all()) calls.emplace_back(seat, seat->last_call());
  }
  nb::list rows;
  for (const auto& [seat, last] : calls) {
    if (!last) continue;
    nb::dict row;
    row["communicator"] = seat->key() + " on GPUs";
    row["rank"] = seat->rank();
    row["number"] = last->number;
    row["launch"] = last->number;  // all that is known of the order of calls
    for (const char* name : {"call", "copy", "iteration"}) row[name] = 0;
    row["name"] = last->site.name;
    row["signature"] = last->site.signature;
    for (const char* time : {"arrived_s", "ready_s", "finished_s"}) row[time] = nb::none();
    row["outcome"] = last->outcome;
    rows.append(row);
  }
  return rows;
}

void fail(const std::string& key, const std::string& kind, const std::string& message) {
  const std::optional<ErrorKind> known = jaxring::error_kind_from_name(kind);
  if (!known) raise(ErrorKind::kUsageError, "'" + kind + "' is not an error kind");
  Error error;
  error.kind = *known;
  error.message = message;
  Seats::instance().fail(key, error);
}

}  // namespace
}  // namespace jaxring::cuda

NB_MODULE(_cuda, m) {
  using namespace jaxring::cuda;  // NOLINT: the module's own namespace
  backend() = {&cuda_runtime(), &cuda_kernels(), &loaded_nccl, &cuda_multicast()};
  m.doc() = "jaxring on GPUs. Internal: use the public names of the package jaxring.";
  m.def("ffi_registrations", [] {
    return jaxring::registrations_of({{"instantiate", jaxring_cuda_instantiate},
                                      {"prepare", jaxring_cuda_prepare},
                                      {"initialize", jaxring_cuda_initialize},
                                      {"execute", jaxring_cuda_execute}});
  });
  m.def("ffi_types", [] { return jaxring::types_of<CallSite>("jaxring_cuda_call_site"); });
  m.def("set_setting", &set_setting, nb::arg("name"), nb::arg("value"));
  m.def("facts", &facts_of_machine, "What there is of CUDA here; asks the driver.");
  m.def("why_not_served", &why_not_served, nb::arg("collective"), nb::arg("op"), nb::arg("dtype"),
        nb::arg("algorithm"), nb::arg("deterministic"), nb::arg("world_size"));
  m.def("why_not_by_nccl", &why_not_by_nccl, nb::arg("collective"), nb::arg("op"), nb::arg("dtype"),
        nb::arg("deterministic"));
  m.def("all_peers", &all_peers, nb::arg("devices"));
  m.def(
      "create",
      [](const std::string& key, const std::vector<int>& ranks, const std::vector<int>& devices,
         int world_size) {
        nb::gil_scoped_release release;
        guarded([&] { Seats::instance().create(key, ranks, devices, world_size); });
      },
      nb::arg("key"), nb::arg("ranks"), nb::arg("devices"), nb::arg("world_size"));
  m.def("cards", &cards, nb::arg("key"));
  m.def("map", &map, nb::arg("key"), nb::arg("cards"));
  m.def(
      "decide",
      [](const std::string& key, const std::vector<uint64_t>& mapped) {
        guarded([&] { Seats::instance().decide(key, mapped); });
      },
      nb::arg("key"), nb::arg("mapped"));
  m.def("fail", &fail, nb::arg("key"), nb::arg("kind"), nb::arg("message"));
  m.def(
      "state", [](const std::string& key) { return Seats::instance().state(key); }, nb::arg("key"));
  m.def(
      "close",
      [](const std::string& key) {
        nb::gil_scoped_release release;
        Seats::instance().close(key);
      },
      nb::arg("key"));
  m.def(
      "rejoin",
      [] {
        nb::gil_scoped_release release;
        Seats::instance().rejoin();
      },
      "Forgets the communicators of XLA's cliques, which the next run makes anew.");
  m.def("stats", &stats, nb::arg("reset") = false);
  m.def("flight_record", &flight_record, "The last call of each rank of this process.");
  jaxring::bind_events(m);
  m.def("stop", [] {
    nb::gil_scoped_release release;
    Watchdog::instance().stop();
  });
  m.def("error_details", &jaxring::error_details, nb::arg("message"));
}
