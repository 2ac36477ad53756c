// The attributes of the custom call "jaxring_collective", the same on every platform;
// docs/design.md lists them. What all platforms' handlers need of XLA's types is here too.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/communicator/request.h"
#include "xla_ffi/core/error.h"

namespace jaxring {

// One of them. Throws std::runtime_error if it is missing or of another type.
template <typename T>
T attribute(xla::ffi::Dictionary attributes, const char* name) {
  xla::ffi::ErrorOr<T> value = attributes.get<T>(name);
  if (value.has_error()) {
    throw std::runtime_error("attribute " + std::string(name) + ": " + value.error().message());
  }
  return *value;
}
std::string text_attribute(xla::ffi::Dictionary attributes, const char* name);
std::vector<int64_t> numbers_attribute(xla::ffi::Dictionary attributes, const char* name);

struct CallAttributes {
  std::string module;
  uint32_t call = 0;
  bool ordered = false;
  std::string communicator;                  // a Communicator's key, or empty
  std::vector<std::vector<int64_t>> groups;  // of partition ids
  std::vector<int64_t> device_ids;           // by partition id; empty if the mesh is abstract
  std::vector<int64_t> processes;            // by partition id, likewise
  CallInfo info;                             // without dtype and signature

  // Throws std::runtime_error.
  explicit CallAttributes(xla::ffi::Dictionary attributes);

  // The name of a group's communicator. Throws std::runtime_error.
  std::string key_of_group(const std::vector<int64_t>& partitions) const;
};

// The fixed part of a call, with what is known only from its operands; `shapes` is their text.
CallInfo complete(CallInfo info, DType dtype, const std::string& shapes);

std::optional<DType> dtype_of(xla::ffi::DataType type);

// `error` for XLA, and remembered, so that Python can have the typed one again.
xla::ffi::Error to_ffi(const Error& error);

}  // namespace jaxring
