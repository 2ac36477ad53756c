// One HLO instruction of one executable: its attributes, parsed once, and what identifies its
// executions.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/ffi/attributes.h"

namespace jaxring {

class CallSite {
 public:
  static xla::ffi::TypeId id;

  // From the instruction's attributes; see docs/design.md for their list.
  static xla::ffi::ErrorOr<std::unique_ptr<CallSite>> create(xla::ffi::Dictionary attributes);
  ~CallSite();

  // One execution by one device. The shared pointers' counts are the device's own: counts that all
  // devices share would travel between their cores with each call.
  struct Visit {
    std::shared_ptr<Communicator> communicator;
    int rank = 0;
    std::shared_ptr<const CallInfo> info;
    uint32_t iteration = 0;  // how often the device has run this call in this launch before
  };
  // Throws std::runtime_error if the device takes no part. `shapes` is asked for at the partition's
  // first execution only.
  Visit visit(int partition, int device_ordinal, uint64_t run_id, DType dtype,
              const std::function<std::string()>& shapes);

  Collective collective() const { return attributes_.info.collective; }
  uint32_t call() const { return attributes_.call; }
  // Whether it is chained to the ordered calls around it; see primitive.py.
  bool ordered() const { return attributes_.ordered; }
  // Which of the copies that XLA made of this call (an inner jit called twice): their order at
  // Instantiate.
  uint32_t copy();

 private:
  explicit CallSite(xla::ffi::Dictionary attributes)
      : attributes_(attributes), stations_(partition_count()) {}
  std::shared_ptr<Communicator> communicator_of_group(const std::vector<int64_t>& group) const;
  std::pair<std::string, uint32_t> id_of_call() const {
    return {attributes_.module, attributes_.call};
  }

  const CallAttributes attributes_;
  uint32_t instantiated_ = 0;      // how many copies came before this one
  std::atomic<int64_t> copy_{-1};  // once known

  struct Iteration {
    int device_ordinal;
    uint64_t run_id;
    uint32_t next;
  };
  // What belongs to one partition id, and so to one device.
  struct alignas(JR_CACHE_LINE) Station {
    std::mutex mutex;
    Visit visit;  // but for the iteration
    std::vector<Iteration> iterations;
  };
  void find_place(int partition, Visit& visit) const;
  static uint32_t next_iteration(Station& station, int device_ordinal, uint64_t run_id);
  int partition_count() const;

  std::vector<Station> stations_;  // by partition id; as many as there are, from the beginning
};

}  // namespace jaxring
