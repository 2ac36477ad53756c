#include "xla_ffi/ffi/call_site.h"

#include <algorithm>
#include <map>
#include <stdexcept>

#include "xla_ffi/communicator/registry.h"

namespace jaxring {

namespace ffi = xla::ffi;

ffi::TypeId CallSite::id = {};

namespace {

// The copies of one call. XLA instantiates all copies of an executable before it runs any, so at
// the first execution `instantiated` is their number; a later compilation of the same module
// continues the count and is folded back by it.
struct Copies {
  uint32_t instantiated = 0;
  uint32_t alive = 0;
  uint32_t per_executable = 0;  // 0 until the first execution
};

std::mutex& copies_mutex() {
  static std::mutex& mutex = *new std::mutex;
  return mutex;
}

using CallOfModule = std::pair<std::string, uint32_t>;

std::map<CallOfModule, Copies>& copies_by_call() {
  static auto& copies = *new std::map<CallOfModule, Copies>;
  return copies;
}

template <typename T>
T attribute(ffi::Dictionary attributes, const char* name) {
  ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (value.has_error()) {
    throw std::runtime_error("attribute " + std::string(name) + ": " + value.error().message());
  }
  return *value;
}

std::string text_attribute(ffi::Dictionary attributes, const char* name) {
  return std::string(attribute<std::string_view>(attributes, name));
}

std::vector<int64_t> numbers_attribute(ffi::Dictionary attributes, const char* name) {
  const auto span = attribute<ffi::Span<const int64_t>>(attributes, name);
  return std::vector<int64_t>(span.begin(), span.end());
}

template <typename Value>
Value known(std::optional<Value> value, const char* what, const std::string& name) {
  if (!value) throw std::runtime_error("unknown " + std::string(what) + " '" + name + "'");
  return *value;
}

}  // namespace

ffi::ErrorOr<std::unique_ptr<CallSite>> CallSite::create(ffi::Dictionary attributes) try {
  std::unique_ptr<CallSite> site(new CallSite);
  site->module_ = text_attribute(attributes, "module");
  site->call_ = static_cast<uint32_t>(attribute<int64_t>(attributes, "call"));
  site->ordered_ = attribute<bool>(attributes, "ordered");
  site->communicator_key_ = text_attribute(attributes, "communicator");
  site->device_ids_ = numbers_attribute(attributes, "device_ids");
  site->processes_ = numbers_attribute(attributes, "processes");
  const std::vector<int64_t> members = numbers_attribute(attributes, "group_members");
  size_t next = 0;
  for (int64_t size : numbers_attribute(attributes, "group_sizes")) {
    if (size < 0 || size > static_cast<int64_t>(members.size() - next)) {
      throw std::runtime_error("group_sizes and group_members don't fit each other");
    }
    site->groups_.emplace_back(members.begin() + next, members.begin() + next + size);
    next += size;
  }
  const std::string collective = text_attribute(attributes, "collective");
  const std::string op = text_attribute(attributes, "op");
  const std::string algorithm = text_attribute(attributes, "algorithm");
  CallInfo& info = site->template_;
  info.collective = known(collective_from_name(collective), "collective", collective);
  info.op = known(reduce_op_from_name(op), "op", op);
  info.algorithm = known(algorithm_from_name(algorithm), "algorithm", algorithm);
  info.chunk_bytes = attribute<int64_t>(attributes, "chunk_bytes");
  info.name = text_attribute(attributes, "name");
  std::lock_guard<std::mutex> lock(copies_mutex());
  Copies& copies = copies_by_call()[{site->module_, site->call_}];
  site->instantiated_ = copies.instantiated++;
  ++copies.alive;
  return site;
} catch (const std::exception& error) {
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                    std::string("jaxring.UsageError: ") + error.what()));
}

CallSite::~CallSite() {
  std::lock_guard<std::mutex> lock(copies_mutex());
  auto found = copies_by_call().find({module_, call_});
  if (found != copies_by_call().end() && --found->second.alive == 0) copies_by_call().erase(found);
}

uint32_t CallSite::copy() {
  int64_t copy = copy_.load(std::memory_order_relaxed);
  if (copy < 0) {
    std::lock_guard<std::mutex> lock(copies_mutex());
    Copies& copies = copies_by_call()[{module_, call_}];
    if (copies.per_executable == 0) copies.per_executable = copies.instantiated;
    copy = instantiated_ % copies.per_executable;
    copy_.store(copy, std::memory_order_relaxed);
  }
  return static_cast<uint32_t>(copy);
}

std::string CallSite::key_of_group(const std::vector<int64_t>& partitions) const {
  // Without a concrete mesh, partitions stand for devices: all of them are of this process then.
  std::string key = device_ids_.empty() ? "partitions:" : "mesh:";
  for (size_t i = 0; i < partitions.size(); ++i) {
    const int64_t partition = partitions[i];
    if (!device_ids_.empty() && partition >= static_cast<int64_t>(device_ids_.size())) {
      throw std::runtime_error("a group names partition " + std::to_string(partition) +
                               ", but the mesh has " + std::to_string(device_ids_.size()));
    }
    key += (i > 0 ? "," : "") +
           std::to_string(device_ids_.empty() ? partition : device_ids_[partition]);
  }
  return key;
}

std::shared_ptr<Communicator> CallSite::communicator_of_group(
    const std::vector<int64_t>& group) const {
  const std::string key = key_of_group(group);
  if (std::shared_ptr<Communicator> existing = Registry::instance().find(key)) return existing;
  for (int64_t partition : group) {
    if (!processes_.empty() && processes_.at(partition) != processes_.at(group.front())) {
      throw std::runtime_error(
          "jaxring: communicator " + key +
          " spans processes and has not been set up; was this program compiled "
          "in another process? Lower it here once, with jax.jit");
    }
  }
  return Registry::instance().find_or_create_local(key, static_cast<int>(group.size()));
}

CallSite::Place CallSite::place_of(int partition) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (static_cast<size_t>(partition) < places_.size() && places_[partition].communicator) {
    return places_[partition];
  }
  Place place;
  if (!communicator_key_.empty()) {
    place.communicator = Registry::instance().find(communicator_key_);
    if (!place.communicator) {
      throw std::runtime_error("communicator " + communicator_key_ +
                               " is closed; make a new one with jaxring.init()");
    }
    const CommunicatorSpec& spec = place.communicator->spec();
    place.rank = static_cast<int>(
        std::find(spec.processes.begin(), spec.processes.end(), spec.self_process) -
        spec.processes.begin());
    return place;  // not cached: a closed and re-made communicator keeps its key
  }
  for (const std::vector<int64_t>& group : groups_) {
    auto member = std::find(group.begin(), group.end(), partition);
    if (member == group.end()) continue;
    place.rank = static_cast<int>(member - group.begin());
    place.communicator = communicator_of_group(group);
    break;
  }
  if (!place.communicator) {
    throw std::runtime_error("partition " + std::to_string(partition) +
                             " is in none of the call's groups");
  }
  if (static_cast<size_t>(partition) >= places_.size()) places_.resize(partition + 1);
  places_[partition] = place;
  return place;
}

std::shared_ptr<const CallInfo> CallSite::info(DType dtype,
                                               const std::function<std::string()>& shapes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (info_) return info_;
  auto info = std::make_shared<CallInfo>(template_);
  info->dtype = dtype;
  std::string text = std::string(name_of(info->collective)) + "(" + name_of(info->op) + ", " +
                     shapes() + ", algorithm=" + std::string(info_of(info->algorithm).name);
  if (info->chunk_bytes > 0) text += ", chunk_bytes=" + std::to_string(info->chunk_bytes);
  info->signature = Signature(text + ")");
  info_ = std::move(info);
  return info_;
}

uint32_t CallSite::next_iteration(int device_ordinal, uint64_t run_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Iteration& iteration : iterations_) {
    if (iteration.device_ordinal != device_ordinal) continue;
    if (iteration.run_id != run_id) iteration = Iteration{device_ordinal, run_id, 0};
    return iteration.next++;
  }
  iterations_.push_back(Iteration{device_ordinal, run_id, 1});
  return 0;
}

}  // namespace jaxring
