// The cliques that XLA makes for a handler, through its Collectives extension.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "xla/ffi/api/ffi.h"
#include "xla_ffi/cuda_ffi/collectives_abi.h"

namespace jaxring::cuda {

// The cliques of one execution, or why there are none.
class Cliques {
 public:
  Cliques(const XLA_FFI_Api* api, const abi::CollectivesExtension* extension, std::string why_not)
      : api_(api), extension_(extension), why_not_(std::move(why_not)) {}

  bool available() const { return extension_ != nullptr; }
  const std::string& why_not() const { return why_not_; }

  // In Prepare: XLA makes the clique before Initialize. The text of an error, or nothing.
  std::optional<std::string> request(const std::vector<std::vector<int64_t>>& groups) const;
  // In Initialize and Execute: the communicator of this device's group.
  std::optional<std::string> get(const std::vector<std::vector<int64_t>>& groups,
                                 void** communicator) const;

 private:
  std::optional<std::string> taken(XLA_FFI_Error* error) const;

  const XLA_FFI_Api* api_;
  const abi::CollectivesExtension* extension_;
  std::string why_not_;
};

// Looks for the extension in any of the versions above.
Cliques find_cliques(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context);

// Asks for Cliques in a handler's binding; unlike XLA's own tag it does not insist on one version,
// nor on there being an extension.
struct CliquesIfAny {};

}  // namespace jaxring::cuda

template <>
struct xla::ffi::CtxDecoding<jaxring::cuda::CliquesIfAny> {
  using Type = jaxring::cuda::Cliques;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine&) {
    return jaxring::cuda::find_cliques(api, context);
  }
};
