// Our declarations of the Collectives extension against XLA's own headers, where the installed
// jaxlib has them (0.11.2 and newer). Nothing to run: if it compiles, they agree.
#include <gtest/gtest.h>

#include <utility>

#include "xla/ffi/api/c_api.h"
#include "xla/ffi/api/collectives_c_api.h"
#include "xla_ffi/cuda_ffi/collectives_abi.h"

namespace ours = jaxring::cuda::abi;

#define EXPECT_SAME(mine, our_member, theirs, their_member)                    \
  static_assert(offsetof(mine, our_member) == offsetof(theirs, their_member)); \
  static_assert(sizeof(std::declval<mine>().our_member) ==                     \
                sizeof(std::declval<theirs>().their_member))

EXPECT_SAME(ours::ExtensionId, type, XLA_FFI_ExtensionId, extension_type);
EXPECT_SAME(ours::ExtensionId, major, XLA_FFI_ExtensionId, major_version);
EXPECT_SAME(ours::ExtensionId, minor, XLA_FFI_ExtensionId, minor_version);
EXPECT_SAME(ours::ExtensionHeader, id, XLA_FFI_Extension, id);
EXPECT_SAME(ours::ExtensionHeader, next, XLA_FFI_Extension, next);
EXPECT_SAME(ours::FindExtensionArgs, context, XLA_FFI_InvokeContext_FindExtension_Args, ctx);
EXPECT_SAME(ours::FindExtensionArgs, type, XLA_FFI_InvokeContext_FindExtension_Args,
            extension_type);
EXPECT_SAME(ours::FindExtensionArgs, found, XLA_FFI_InvokeContext_FindExtension_Args, extension);
EXPECT_SAME(ours::ReplicaGroup, ids, XLA_FFI_ReplicaGroup, ids);
EXPECT_SAME(ours::ReplicaGroup, size, XLA_FFI_ReplicaGroup, size);
EXPECT_SAME(ours::RequestArgs, group_mode, XLA_FFI_Communicator_Request_Args, group_mode);
EXPECT_SAME(ours::RequestArgs, groups, XLA_FFI_Communicator_Request_Args, groups);
EXPECT_SAME(ours::RequestArgs, group_count, XLA_FFI_Communicator_Request_Args, num_groups);
EXPECT_SAME(ours::RequestArgs, communication_id, XLA_FFI_Communicator_Request_Args,
            communication_id);
EXPECT_SAME(ours::GetArgs, group_mode, XLA_FFI_Communicator_Get_Args, group_mode);
EXPECT_SAME(ours::GetArgs, groups, XLA_FFI_Communicator_Get_Args, groups);
EXPECT_SAME(ours::GetArgs, group_count, XLA_FFI_Communicator_Get_Args, num_groups);
EXPECT_SAME(ours::GetArgs, communication_id, XLA_FFI_Communicator_Get_Args, communication_id);
EXPECT_SAME(ours::GetArgs, communicator, XLA_FFI_Communicator_Get_Args, communicator);
EXPECT_SAME(ours::CollectivesExtension, state, XLA_FFI_Collectives_Extension, state);
EXPECT_SAME(ours::CollectivesExtension, request_communicator, XLA_FFI_Collectives_Extension,
            request_communicator);
EXPECT_SAME(ours::CollectivesExtension, get_communicator, XLA_FFI_Collectives_Extension,
            get_communicator);
static_assert(sizeof(ours::RequestArgs) >= XLA_FFI_Communicator_Request_Args_STRUCT_SIZE);
static_assert(sizeof(ours::GetArgs) >= XLA_FFI_Communicator_Get_Args_STRUCT_SIZE);
static_assert(ours::kCollectivesType == XLA_FFI_Extension_Collectives);
static_assert(ours::kGroupsOfFlattenedIds == XLA_FFI_GROUP_FLATTENED_ID);

TEST(CollectivesAbi, TheTailStandsWhereTheOldestApiEnds) {
  EXPECT_EQ(offsetof(XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension),
            offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get) + sizeof(void*));
  EXPECT_EQ(ours::kOldestApiBytes, offsetof(XLA_FFI_Api, XLA_FFI_InvokeContext_FindExtension));
  EXPECT_GE(ours::kNewestExtensionMinor, XLA_FFI_Extension_Collectives_MinorVersion)
      << "look at what this version of the extension changes, then raise the number";
}
