// NVLink's multicast objects for fake GPUs.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>

#include "xla_ffi/cuda_ffi/multicast.h"

namespace jaxring::cuda::fake {

// NVLink's multicast, as far as set-up goes. What must not go wrong alone: a bind before all
// devices are there, and objects that nobody releases.
struct FakeSwitch {
  std::function<bool(int)> supports = [](int) { return false; };
  std::function<bool(int)> binds = [](int) { return true; };
  std::atomic<int> objects{0}, added{0}, bound{0}, wanted{0}, early{0};
};
inline FakeSwitch& nvswitch() {
  static FakeSwitch instance;
  return instance;
}

inline const MulticastApi multicast = {
    .supported = [](int of, bool* yes) -> Failure {
      *yes = nvswitch().supports(of);
      return std::nullopt;
    },
    .create = [](int devices, int64_t* bytes, uint64_t* object) -> Failure {
      nvswitch().added = 0;
      nvswitch().wanted = devices;
      *bytes = 4096;
      *object = static_cast<uint64_t>(++nvswitch().objects);
      return std::nullopt;
    },
    .add = [](uint64_t, int) -> Failure {
      ++nvswitch().added;
      return std::nullopt;
    },
    .bind = [](uint64_t object, int of, int64_t bytes, MulticastWindow* window) -> Failure {
      nvswitch().early += nvswitch().added != nvswitch().wanted;
      if (!nvswitch().binds(of)) return "the fabric manager is not ready";
      ++nvswitch().bound;
      char* own = static_cast<char*>(std::calloc(1, bytes));
      *window = {object, own, own, bytes};
      return std::nullopt;
    },
    .unbind =
        [](const MulticastWindow& window) {
          --nvswitch().bound;
          std::free(window.own);
        },
    .release = [](uint64_t) { --nvswitch().objects; },
};

}  // namespace jaxring::cuda::fake
