// One HLO instruction of one executable: its attributes, parsed once, and what identifies its
// executions.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/communicator/communicator.h"

namespace jaxring {

class CallSite {
 public:
  static xla::ffi::TypeId id;

  // From the instruction's attributes; see docs/design.md for their list.
  static xla::ffi::ErrorOr<std::unique_ptr<CallSite>> create(xla::ffi::Dictionary attributes);
  ~CallSite();

  // Where a device takes part. Throws std::runtime_error if it does not.
  struct Place {
    std::shared_ptr<Communicator> communicator;
    int rank = 0;
  };
  Place place_of(int partition);

  // The call's fixed part; `shapes` is asked for at the first execution only.
  std::shared_ptr<const CallInfo> info(DType dtype, const std::function<std::string()>& shapes);

  uint32_t call() const { return call_; }
  // Whether it is chained to the ordered calls around it; see primitive.py.
  bool ordered() const { return ordered_; }
  // Which of the copies that XLA made of this call (an inner jit called twice): their order at
  // Instantiate.
  uint32_t copy();
  // How often the device has run this call in this launch.
  uint32_t next_iteration(int device_ordinal, uint64_t run_id);

 private:
  CallSite() = default;
  std::shared_ptr<Communicator> communicator_of_group(const std::vector<int64_t>& group) const;
  std::string key_of_group(const std::vector<int64_t>& partitions) const;

  std::string module_;
  uint32_t call_ = 0;
  bool ordered_ = false;
  uint32_t instantiated_ = 0;      // how many copies came before this one
  std::atomic<int64_t> copy_{-1};  // once known
  std::string communicator_key_;
  std::vector<std::vector<int64_t>> groups_;  // of partition ids
  std::vector<int64_t> device_ids_;           // by partition id; empty if the mesh is abstract
  std::vector<int64_t> processes_;            // by partition id, likewise
  CallInfo template_;

  std::mutex mutex_;
  std::vector<Place> places_;  // by partition id, once looked up
  std::shared_ptr<const CallInfo> info_;
  struct Iteration {
    int device_ordinal;
    uint64_t run_id;
    uint32_t next;
  };
  std::vector<Iteration> iterations_;
};

}  // namespace jaxring
