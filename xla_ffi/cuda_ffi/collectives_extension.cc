#include "xla_ffi/cuda_ffi/collectives_extension.h"

#include <optional>

namespace jaxring::cuda {

namespace ffi = xla::ffi;

namespace {

// XLA's own separate communicator for us: its collectives use 0 and may run beside ours on other
// streams, in an order that differs between ranks.
constexpr int64_t kCommunicationId = 0x6A72;

std::vector<abi::ReplicaGroup> views_of(const std::vector<std::vector<int64_t>>& groups) {
  std::vector<abi::ReplicaGroup> views;
  views.reserve(groups.size());
  for (const std::vector<int64_t>& group : groups) views.push_back({group.data(), group.size()});
  return views;
}

std::string version_text(const abi::ExtensionId& id) {
  return std::to_string(id.major) + "." + std::to_string(id.minor);
}

std::string text_of(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  std::string text = ffi::internal::GetErrorMessage(api, error);
  ffi::internal::DestroyError(api, error);
  return text;
}

}  // namespace

std::optional<std::string> Cliques::taken(XLA_FFI_Error* error) const {
  if (error == nullptr) return std::nullopt;
  return "XLA's collectives extension: " + text_of(api_, error);
}

std::optional<std::string> Cliques::request(const std::vector<std::vector<int64_t>>& groups) const {
  const std::vector<abi::ReplicaGroup> views = views_of(groups);
  abi::RequestArgs args{sizeof args,  nullptr,      abi::kGroupsOfFlattenedIds,
                        views.data(), views.size(), kCommunicationId};
  return taken(extension_->request_communicator(extension_, &args));
}

std::optional<std::string> Cliques::get(const std::vector<std::vector<int64_t>>& groups,
                                        void** communicator) const {
  const std::vector<abi::ReplicaGroup> views = views_of(groups);
  abi::GetArgs args{sizeof args,  nullptr,      abi::kGroupsOfFlattenedIds,
                    views.data(), views.size(), kCommunicationId,
                    nullptr};
  if (auto error = taken(extension_->get_communicator(extension_, &args))) return error;
  *communicator = args.communicator;
  return std::nullopt;
}

Cliques find_cliques(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context) {
  const auto none = [api](std::string why) { return Cliques(api, nullptr, std::move(why)); };
  if (api->struct_size < abi::kOldestApiBytes + sizeof(abi::ApiTail)) {
    return none("this jaxlib has no collectives extension (0.11.2 is the first that has one)");
  }
  const auto* tail = reinterpret_cast<const abi::ApiTail*>(reinterpret_cast<const char*>(api) +
                                                           abi::kOldestApiBytes);
  abi::FindExtensionArgs args{sizeof args, nullptr, context, abi::kCollectivesType, nullptr};
  if (XLA_FFI_Error* error = tail->find_extension(&args)) return none(text_of(api, error));
  if (args.found == nullptr) return none("XLA offers no collectives extension here");
  const abi::ExtensionId& id = args.found->id;
  if (id.major != abi::kExtensionMajor || id.minor < abi::kOldestExtensionMinor ||
      id.minor > abi::kNewestExtensionMinor ||
      args.found->struct_size < sizeof(abi::CollectivesExtension)) {
    return none("XLA's collectives extension has version " + version_text(id) +
                ", but 0.1 to 0.2 are known");
  }
  return Cliques(api, reinterpret_cast<const abi::CollectivesExtension*>(args.found), "");
}

}  // namespace jaxring::cuda
