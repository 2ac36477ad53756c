// One HLO instruction of one executable on GPUs: its attributes, parsed once, and for each device
// of this process the seat and the call that Execute will enqueue.
//
// Where a device stands among the ranks is never read from the device: the host would wait for the
// kernels before. It comes from XLA's clique, or else from the tables that the lowering has baked
// into the attributes.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/cuda_ffi/collectives_extension.h"
#include "xla_ffi/cuda_ffi/seat.h"
#include "xla_ffi/ffi/attributes.h"

namespace jaxring::cuda {

// What Execute needs.
struct Place {
  std::shared_ptr<Seat> seat;
  KernelCall call;  // but for the pointers
};

// Settings of the module; Python writes them before the first program.
struct ModuleSettings {
  std::atomic<int> process{0};          // this process's index in jax.distributed
  std::atomic<bool> use_cliques{true};  // false: as if XLA offered none
};
ModuleSettings& module_settings();

class CallSite {
 public:
  static xla::ffi::TypeId id;
  static xla::ffi::ErrorOr<std::unique_ptr<CallSite>> create(xla::ffi::Dictionary attributes);

  bool is_barrier() const { return attributes_.info.collective == Collective::kBarrier; }
  // Whether XLA has to make cliques for it.
  bool asks_for_cliques() const;
  const std::vector<std::vector<int64_t>>& groups() const { return attributes_.groups; }

  // Finds or makes the device's place: set-up of the communicator at its first use, and comparison
  // of the ranks' signatures at the first run of this call. Throws std::runtime_error or Failed.
  void initialize(const Cliques& cliques, int device, DType dtype, int64_t count);
  // Null before initialize.
  const Place* place(int device) const;
  // What has broken the communicator of any of the places.
  std::optional<Error> failure() const;

 private:
  static constexpr int kMostDevices = 64;  // of one process

  explicit CallSite(xla::ffi::Dictionary attributes);
  std::shared_ptr<Seat> seat_of(const Cliques& cliques, int device) const;
  std::shared_ptr<Seat> seat_without_clique(const std::string& why_none, int device) const;
  int partition_of(int device) const;  // -1: the tables don't say
  const std::vector<int64_t>& group_of(int partition) const;
  KernelCall kernel_call(DType dtype, int64_t count) const;
  void compare(Seat& seat, const KernelCall& call) const;
  // What the seat adds to the call: its number in the log, and whether there is multicast.
  void number(Seat& seat, KernelCall* call) const;

  const CallAttributes attributes_;
  const std::string shapes_;
  const std::vector<int64_t> local_ids_;  // by partition id: the device's number in its process
  std::mutex mutex_;
  std::vector<std::unique_ptr<Place>> kept_;
  std::array<std::atomic<const Place*>, kMostDevices> places_{};
};

}  // namespace jaxring::cuda
