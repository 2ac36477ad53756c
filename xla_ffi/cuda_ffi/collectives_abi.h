// XLA's FFI Collectives extension as it crosses the boundary: structures of plain C, in our words.
//
// Its own headers (xla/ffi/api/collectives_c_api.h) exist from jaxlib 0.11.2 on only, and handlers
// built with so new a jaxlib are refused by older ones (docs/design.md). Declaring the few members
// here lets the module be built with the oldest jaxlib's headers and ask at run time whether XLA is
// new enough to have extensions, so that one binary serves all versions.
// tests/cpp/collectives_abi_test.cc holds these declarations against XLA's where it has them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "xla/ffi/api/c_api.h"

namespace jaxring::cuda {

namespace abi {

// "Internal" extensions are XLA's affair; we pass none.
struct ExtensionId {
  int64_t type;
  int32_t major;
  int32_t minor;
};

struct ExtensionHeader {
  size_t struct_size;
  ExtensionId id;
  const ExtensionHeader* next;
};

struct FindExtensionArgs {
  size_t struct_size;
  void* extension_start;
  XLA_FFI_ExecutionContext* context;
  int64_t type;
  const ExtensionHeader* found;  // out; null if there is none of this type
};
using FindExtension = XLA_FFI_Error*(FindExtensionArgs*);

// The size of XLA_FFI_Api in the oldest supported version (jaxlib 0.10.2), and what newer ones have
// behind it.
inline constexpr size_t kOldestApiBytes =
    offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void*);
struct ApiTail {
  FindExtension* find_extension;
};

inline constexpr int64_t kCollectivesType = 129;
inline constexpr int kGroupsOfFlattenedIds = 3;

struct ReplicaGroup {
  const int64_t* ids;
  size_t size;
};

struct RequestArgs {
  size_t struct_size;
  void* extension_start;
  int group_mode;
  const ReplicaGroup* groups;
  size_t group_count;
  int64_t communication_id;
};

struct GetArgs {
  size_t struct_size;
  void* extension_start;
  int group_mode;
  const ReplicaGroup* groups;
  size_t group_count;
  int64_t communication_id;
  void* communicator;  // out; on XLA:GPU an ncclComm_t
};

// The part that all versions have: 0.2 (jaxlib 0.12) adds windows behind it.
struct CollectivesExtension {
  ExtensionHeader header;
  void* state;
  XLA_FFI_Error* (*request_communicator)(const CollectivesExtension*, RequestArgs*);
  XLA_FFI_Error* (*get_communicator)(const CollectivesExtension*, GetArgs*);
};

// The versions whose first members are known to be those above. While the major version is 0 a new
// minor one may change anything, so the range ends at the newest that was looked at.
inline constexpr int32_t kExtensionMajor = 0;
inline constexpr int32_t kOldestExtensionMinor = 1;
inline constexpr int32_t kNewestExtensionMinor = 2;

}  // namespace abi

}  // namespace jaxring::cuda
