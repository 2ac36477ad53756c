#include "xla_ffi/cuda_ffi/call_site.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "xla_ffi/cuda_ffi/seats.h"

namespace jaxring::cuda {

namespace ffi = xla::ffi;

ffi::TypeId CallSite::id = {};

ModuleSettings& module_settings() {
  static ModuleSettings settings;
  return settings;
}

ffi::ErrorOr<std::unique_ptr<CallSite>> CallSite::create(ffi::Dictionary attributes) try {
  return std::unique_ptr<CallSite>(new CallSite(attributes));
} catch (const std::exception& error) {
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                    std::string("jaxring.UsageError: ") + error.what()));
}

CallSite::CallSite(ffi::Dictionary attributes)
    : attributes_(attributes),
      shapes_(text_attribute(attributes, "shapes")),
      local_ids_(numbers_attribute(attributes, "local_ids")) {}

bool CallSite::asks_for_cliques() const {
  return attributes_.communicator.empty() && module_settings().use_cliques;
}

const Place* CallSite::place(int device) const {
  if (device < 0 || device >= kMostDevices) return nullptr;
  return places_[device].load(std::memory_order_acquire);
}

std::optional<Error> CallSite::failure() const {
  for (const auto& place : places_) {
    const Place* known = place.load(std::memory_order_acquire);
    if (known == nullptr) continue;
    if (std::optional<Error> error = known->seat->failure()) return error;
  }
  return std::nullopt;
}

int CallSite::partition_of(int device) const {
  for (size_t partition = 0; partition < local_ids_.size(); ++partition) {
    if (local_ids_[partition] == device &&
        attributes_.processes[partition] == module_settings().process) {
      return static_cast<int>(partition);
    }
  }
  return -1;
}

const std::vector<int64_t>& CallSite::group_of(int partition) const {
  for (const std::vector<int64_t>& group : attributes_.groups) {
    if (std::find(group.begin(), group.end(), partition) != group.end()) return group;
  }
  throw std::runtime_error("partition " + std::to_string(partition) +
                           " is in none of the call's groups");
}

std::shared_ptr<Seat> CallSite::seat_without_clique(const std::string& why_none, int device) const {
  if (!attributes_.communicator.empty()) {
    return Seats::instance().wait_for(attributes_.communicator, -1);
  }
  const int partition = partition_of(device);
  if (partition < 0) {
    throw std::runtime_error(
        "the program does not say which rank GPU " + std::to_string(device) +
        " is, since it was lowered for an abstract mesh or another process's devices, and XLA "
        "cannot: " +
        why_none + "; lower it here with jax.jit over a mesh of devices");
  }
  const std::vector<int64_t>& group = group_of(partition);
  const int rank =
      static_cast<int>(std::find(group.begin(), group.end(), partition) - group.begin());
  return Seats::instance().wait_for(attributes_.key_of_group(group), rank);
}

std::shared_ptr<Seat> CallSite::seat_of(const Cliques& cliques, int device) const {
  if (!asks_for_cliques() || !cliques.available()) {
    return seat_without_clique(cliques.why_not(), device);
  }
  void* communicator = nullptr;
  if (auto error = cliques.get(attributes_.groups, &communicator)) {
    throw std::runtime_error(*error);
  }
  const int partition = partition_of(device);
  const std::string key =
      partition >= 0 ? attributes_.key_of_group(group_of(partition)) : "clique of " + shapes_;
  auto seat = Seats::instance().of_clique(key, static_cast<NcclComm>(communicator), device);
  if (partition >= 0) {
    const std::vector<int64_t>& group = group_of(partition);
    const auto rank = std::find(group.begin(), group.end(), partition) - group.begin();
    if (rank != seat->rank()) {
      throw std::runtime_error("XLA numbers the ranks of " + key +
                               " otherwise than the mesh does: rank " + std::to_string(rank) +
                               " is its rank " + std::to_string(seat->rank()) +
                               "; order the mesh's devices by their ids");
    }
  }
  return seat;
}

KernelCall CallSite::kernel_call(DType dtype, int64_t count) const {
  const CallInfo info = complete(attributes_.info, dtype, shapes_);
  KernelCall call;
  call.collective = is_barrier() ? Collective::kAllreduce : info.collective;
  call.op = info.op;
  call.dtype = dtype;
  call.algorithm = info.algorithm;
  call.deterministic = info.deterministic;
  call.root = info.root;
  std::fill(std::begin(call.destinations), std::end(call.destinations), -1);
  if (info.destinations.size() > kMaxRanks) throw std::runtime_error("too many ranks");
  std::copy(info.destinations.begin(), info.destinations.end(), call.destinations);
  call.count = count;
  return call;
}

void CallSite::initialize(const Cliques& cliques, int device, DType dtype, int64_t count) {
  if (device < 0 || device >= kMostDevices) {
    throw std::runtime_error("GPU " + std::to_string(device) + " of a process is beyond " +
                             std::to_string(kMostDevices));
  }
  const Place* known = place(device);
  // Without cliques a seat lasts; XLA may have made the clique anew, for instance after an error.
  if (known != nullptr && known->seat->clique() == nullptr && attributes_.communicator.empty() &&
      !known->seat->retired()) {
    return;
  }
  std::shared_ptr<Seat> seat = seat_of(cliques, device);
  if (known != nullptr && known->seat == seat) return;
  auto place = std::make_unique<Place>();
  place->call = kernel_call(dtype, count);
  place->seat = std::move(seat);
  compare(*place->seat, place->call);
  number(*place->seat, &place->call);
  std::lock_guard<std::mutex> lock(mutex_);
  kept_.push_back(std::move(place));  // Execute may still be reading the one before
  places_[device].store(kept_.back().get(), std::memory_order_release);
}

void CallSite::number(Seat& seat, KernelCall* call) const {
  call->multimem = seat.multicast().there();
  const CallInfo info = complete(attributes_.info, call->dtype, shapes_);
  call->site = seat.site_of({name_of(info.collective), info.signature.text, info.label(), info.name,
                             seat.traffic_of(*call)});
}

void CallSite::compare(Seat& seat, const KernelCall& call) const {
  const std::string text = complete(attributes_.info, call.dtype, shapes_).signature.text;
  const std::vector<std::string> texts = seat.all_gather(text);
  std::map<std::string, std::string> ranks_by_text;
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    std::string& ranks = ranks_by_text[texts[rank]];
    ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(rank);
  }
  if (ranks_by_text.size() > 1) {
    Error error;
    error.kind = ErrorKind::kMismatchError;
    error.call = attributes_.info.label();
    for (const auto& [what, ranks] : ranks_by_text) {
      error.signatures.push_back(what);
      error.message += (error.message.empty() ? "" : "; ") + ranks + ": " + what;
    }
    error.message = "ranks of communicator " + seat.key() +
                    " make different calls: " + error.message +
                    "; run the same program on every rank";
    seat.fail(error);
    throw Failed{error};
  }
  std::string why_not;
  if (!seat.serves(call, &why_not)) {
    throw std::runtime_error(attributes_.info.label() + ": " + why_not +
                             "; choose another dtype, op or algorithm, or jax.lax for this call");
  }
}

}  // namespace jaxring::cuda
