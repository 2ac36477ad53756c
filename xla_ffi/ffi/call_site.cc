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

}  // namespace

ffi::ErrorOr<std::unique_ptr<CallSite>> CallSite::create(ffi::Dictionary attributes) try {
  std::unique_ptr<CallSite> site(new CallSite(attributes));
  std::lock_guard<std::mutex> lock(copies_mutex());
  Copies& copies = copies_by_call()[site->id_of_call()];
  site->instantiated_ = copies.instantiated++;
  ++copies.alive;
  return site;
} catch (const std::exception& error) {
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                    std::string("jaxring.UsageError: ") + error.what()));
}

CallSite::~CallSite() {
  std::lock_guard<std::mutex> lock(copies_mutex());
  auto found = copies_by_call().find(id_of_call());
  if (found != copies_by_call().end() && --found->second.alive == 0) copies_by_call().erase(found);
}

uint32_t CallSite::copy() {
  int64_t copy = copy_.load(std::memory_order_relaxed);
  if (copy < 0) {
    std::lock_guard<std::mutex> lock(copies_mutex());
    Copies& copies = copies_by_call()[id_of_call()];
    if (copies.per_executable == 0) copies.per_executable = copies.instantiated;
    copy = instantiated_ % copies.per_executable;
    copy_.store(copy, std::memory_order_relaxed);
  }
  return static_cast<uint32_t>(copy);
}

std::shared_ptr<Communicator> CallSite::communicator_of_group(
    const std::vector<int64_t>& group) const {
  const std::string key = attributes_.key_of_group(group);
  if (std::shared_ptr<Communicator> existing = Registry::instance().find(key)) return existing;
  for (int64_t partition : group) {
    const std::vector<int64_t>& processes = attributes_.processes;
    if (!processes.empty() && processes.at(partition) != processes.at(group.front())) {
      throw std::runtime_error(
          "jaxring: communicator " + key +
          " spans processes and has not been set up; was this program compiled "
          "in another process? Lower it here once, with jax.jit");
    }
  }
  return Registry::instance().find_or_create_local(key, static_cast<int>(group.size()));
}

int CallSite::partition_count() const {
  int64_t last = 0;  // in communicator mode there is just this one
  for (const std::vector<int64_t>& group : attributes_.groups) {
    for (int64_t partition : group) last = std::max(last, partition);
  }
  return static_cast<int>(last) + 1;
}

// Sets the communicator and the rank.
void CallSite::find_place(int partition, Visit& visit) const {
  std::shared_ptr<Communicator> communicator;
  if (!attributes_.communicator.empty()) {
    communicator = Registry::instance().find(attributes_.communicator);
    if (!communicator) {
      throw std::runtime_error("communicator " + attributes_.communicator +
                               " is closed; make a new one with jaxring.init()");
    }
    visit.rank = communicator->spec().self_rank();
  }
  for (const std::vector<int64_t>& group : attributes_.groups) {
    auto member = std::find(group.begin(), group.end(), partition);
    if (communicator || member == group.end()) continue;
    visit.rank = static_cast<int>(member - group.begin());
    communicator = communicator_of_group(group);
  }
  if (!communicator) {
    throw std::runtime_error("partition " + std::to_string(partition) +
                             " is in none of the call's groups");
  }
  // A count of its own, which keeps the communicator's.
  const auto owner = std::make_shared<std::shared_ptr<Communicator>>(communicator);
  visit.communicator = std::shared_ptr<Communicator>(owner, communicator.get());
}

CallSite::Visit CallSite::visit(int partition, int device_ordinal, uint64_t run_id, DType dtype,
                                const std::function<std::string()>& shapes) {
  if (partition < 0 || static_cast<size_t>(partition) >= stations_.size()) {
    throw std::runtime_error("partition " + std::to_string(partition) +
                             " is in none of the call's groups");
  }
  Station& station = stations_[partition];
  std::lock_guard<std::mutex> lock(station.mutex);
  Visit& visit = station.visit;
  // closed: rejoin() or init() has made another, or will
  if (!visit.communicator || visit.communicator->closed()) find_place(partition, visit);
  if (!visit.info) {
    visit.info = std::make_shared<CallInfo>(complete(attributes_.info, dtype, shapes()));
  }
  visit.iteration = next_iteration(station, device_ordinal, run_id);
  return visit;
}

uint32_t CallSite::next_iteration(Station& station, int device_ordinal, uint64_t run_id) {
  for (Iteration& iteration : station.iterations) {
    if (iteration.device_ordinal != device_ordinal) continue;
    if (iteration.run_id != run_id) iteration = Iteration{device_ordinal, run_id, 0};
    return iteration.next++;
  }
  station.iterations.push_back(Iteration{device_ordinal, run_id, 1});
  return 0;
}

}  // namespace jaxring
