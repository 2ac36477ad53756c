// Multicast objects of the CUDA driver behind MulticastApi. Its functions are asked for by name:
// the driver may be too old to have them, and is never linked.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include "xla_ffi/cuda_ffi/multicast.h"

namespace jaxring::cuda {
namespace {

constexpr unsigned kSince = 12010;  // CUDA 12.1, which brought them

struct Driver {
  decltype(&cuDeviceGetAttribute) device_attribute = nullptr;
  decltype(&cuMulticastGetGranularity) granularity = nullptr;
  decltype(&cuMulticastCreate) create = nullptr;
  decltype(&cuMulticastAddDevice) add = nullptr;
  decltype(&cuMulticastBindMem) bind = nullptr;
  decltype(&cuMemCreate) allocate = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) unreserve = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  Failure missing;

  template <typename Function>
  void look_up(const char* name, Function* function) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, &found, kSince, cudaEnableDefault, &result);
    if (error != cudaSuccess) cudaGetLastError();
    *function = reinterpret_cast<Function>(found);
    if (found == nullptr) missing = "the CUDA driver has no " + std::string(name);
  }
};

const Driver& driver() {
  static const Driver found = [] {
    Driver d;
    d.look_up("cuDeviceGetAttribute", &d.device_attribute);
    d.look_up("cuMulticastGetGranularity", &d.granularity);
    d.look_up("cuMulticastCreate", &d.create);
    d.look_up("cuMulticastAddDevice", &d.add);
    d.look_up("cuMulticastBindMem", &d.bind);
    d.look_up("cuMemCreate", &d.allocate);
    d.look_up("cuMemRelease", &d.release);
    d.look_up("cuMemAddressReserve", &d.reserve);
    d.look_up("cuMemAddressFree", &d.unreserve);
    d.look_up("cuMemMap", &d.map);
    d.look_up("cuMemUnmap", &d.unmap);
    d.look_up("cuMemSetAccess", &d.set_access);
    return d;
  }();
  return found;
}

Failure check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return std::nullopt;
  return std::string(what) + " gave CUresult " + std::to_string(static_cast<int>(result));
}

Failure supported(int device, bool* yes) {
  if (driver().missing) return driver().missing;
  int value = 0;
  // A runtime's number of a device is the driver's CUdevice.
  if (Failure failure =
          check(driver().device_attribute(&value, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, device),
                "cuDeviceGetAttribute")) {
    return failure;
  }
  *yes = value != 0;
  return std::nullopt;
}

Failure create(int devices, int64_t* bytes, uint64_t* object) {
  CUmulticastObjectProp properties{};
  properties.numDevices = static_cast<unsigned>(devices);
  properties.size = static_cast<size_t>(*bytes);
  size_t granularity = 0;  // the least, 2 MiB: the recommended one may be half a GiB
  if (Failure failure =
          check(driver().granularity(&granularity, &properties, CU_MULTICAST_GRANULARITY_MINIMUM),
                "cuMulticastGetGranularity")) {
    return failure;
  }
  properties.size = (properties.size + granularity - 1) / granularity * granularity;
  CUmemGenericAllocationHandle handle = 0;
  if (Failure failure = check(driver().create(&handle, &properties), "cuMulticastCreate")) {
    return failure;
  }
  *bytes = static_cast<int64_t>(properties.size);
  *object = handle;
  return std::nullopt;
}

Failure add(uint64_t object, int device) {
  return check(driver().add(object, device), "cuMulticastAddDevice");
}

void unmap(char* at, int64_t bytes) {
  const CUdeviceptr address = reinterpret_cast<CUdeviceptr>(at);
  driver().unmap(address, static_cast<size_t>(bytes));
  driver().unreserve(address, static_cast<size_t>(bytes));
}

// Of memory or of a multicast object, for the device.
Failure map(uint64_t handle, int device, int64_t bytes, char** at) {
  const size_t size = static_cast<size_t>(bytes);
  CUdeviceptr address = 0;
  if (Failure failure = check(driver().reserve(&address, size, 0, 0, 0), "cuMemAddressReserve")) {
    return failure;
  }
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  Failure failure = check(driver().map(address, size, 0, handle, 0), "cuMemMap");
  if (failure) {
    driver().unreserve(address, size);
    return failure;
  }
  *at = reinterpret_cast<char*>(address);
  failure = check(driver().set_access(address, size, &access, 1), "cuMemSetAccess");
  if (!failure) return std::nullopt;
  unmap(*at, bytes);
  *at = nullptr;
  return failure;
}

void unbind(const MulticastWindow& window) {
  if (window.all != nullptr) unmap(window.all, window.bytes);
  if (window.own != nullptr) unmap(window.own, window.bytes);
  driver().release(window.memory);
}

Failure bind_and_map(uint64_t object, int device, int64_t bytes, MulticastWindow* window) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  CUmemGenericAllocationHandle memory = 0;
  const size_t size = static_cast<size_t>(bytes);
  if (Failure failure = check(driver().allocate(&memory, size, &properties, 0), "cuMemCreate")) {
    return failure;
  }
  window->memory = memory;
  window->bytes = bytes;
  Failure failure = check(driver().bind(object, 0, memory, 0, size, 0), "cuMulticastBindMem");
  if (!failure) failure = map(memory, device, bytes, &window->own);
  if (!failure) failure = map(object, device, bytes, &window->all);
  return failure;
}

Failure bind(uint64_t object, int device, int64_t bytes, MulticastWindow* window) {
  Failure failure = bind_and_map(object, device, bytes, window);
  if (!failure && cudaMemset(window->own, 0, static_cast<size_t>(bytes)) != cudaSuccess) {
    cudaGetLastError();
    failure = "cudaMemset of a multicast window failed";
  }
  if (!failure && cudaStreamSynchronize(nullptr) != cudaSuccess) {
    failure = "cudaStreamSynchronize failed";
  }
  if (failure && window->memory != 0) {
    unbind(*window);
    *window = {};
  }
  return failure;
}

void release(uint64_t object) { driver().release(object); }

}  // namespace

const MulticastApi& cuda_multicast() {
  static const MulticastApi api = {supported, create, add, bind, unbind, release};
  return api;
}

}  // namespace jaxring::cuda
