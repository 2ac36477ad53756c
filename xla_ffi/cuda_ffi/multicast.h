// Windows on a multicast object, for calls with Method::kMultimem: where all ranks of a
// communicator are GPUs of one process, joined by NVSwitch. (Between processes the object's handle
// would have to travel as a file descriptor; such communicators do without.)
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "xla_ffi/cuda_ffi/card.h"
#include "xla_ffi/cuda_ffi/runtime.h"

namespace jaxring::cuda {

// One rank's memory and the two addresses at which its GPU reaches it.
struct MulticastWindow {
  uint64_t memory = 0;  // the driver's handle
  char* own = nullptr;  // this rank's alone
  char* all = nullptr;  // the multicast object's
  int64_t bytes = 0;
};

// What set-up calls of the driver, as a table like Runtime.
struct MulticastApi {
  Failure (*supported)(int device, bool* yes);
  // An object for so many GPUs; `bytes` is rounded up to what it takes.
  Failure (*create)(int devices, int64_t* bytes, uint64_t* object);
  Failure (*add)(uint64_t object, int device);
  // Zeroed memory of the device, bound to the object, which all devices must have been added to.
  Failure (*bind)(uint64_t object, int device, int64_t bytes, MulticastWindow* window);
  void (*unbind)(const MulticastWindow& window);
  void (*release)(uint64_t object);
};
const MulticastApi& cuda_multicast();

// Why the device has none, or nothing.
Failure multicast_unsupported(int device);

// A rank's part of an object; released with it.
class Multicast {
 public:
  Multicast() = default;
  ~Multicast() { release(); }
  Multicast(const Multicast&) = delete;
  Multicast& operator=(const Multicast&) = delete;

  // Short texts of all ranks, in rank order; all call it together.
  using Gather = std::function<std::vector<std::string>(const std::string&)>;

  // Every rank of the communicator calls it together, on its device. Afterwards all have a window,
  // or none has and why_not() says why, the same on all ranks. Throws what `gather` throws.
  void set_up(const std::vector<Card>& cards, int rank, const Gather& gather);

  bool there() const { return window_.all != nullptr; }
  const MulticastWindow& window() const { return window_; }
  const std::string& why_not() const { return why_not_; }

 private:
  bool agreed(const Failure& failure, const Gather& gather);
  void release();

  MulticastWindow window_;
  uint64_t object_ = 0;
  bool owns_object_ = false;
  std::string why_not_ = "it has not been set up";
};

}  // namespace jaxring::cuda
