#include "xla_ffi/ffi/error_details.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "xla_ffi/communicator/registry.h"

namespace nb = nanobind;

namespace jaxring {

nb::object error_details(const std::string& message) {
  const std::optional<Error> error = Registry::instance().recall(message);
  if (!error) return nb::none();
  nb::dict details;
  details["kind"] = std::string(name_of(error->kind));
  if (!error->missing_ranks.empty()) details["missing_ranks"] = error->missing_ranks;
  details["rank"] = error->rank >= 0 ? nb::object(nb::int_(error->rank)) : nb::none();
  details["host"] = error->host.empty() ? nb::none() : nb::object(nb::str(error->host.c_str()));
  details["pid"] = error->pid > 0 ? nb::object(nb::int_(error->pid)) : nb::none();
  details["call"] = error->call.empty() ? nb::none() : nb::object(nb::str(error->call.c_str()));
  details["sequence"] = error->sequence >= 0 ? nb::object(nb::int_(error->sequence)) : nb::none();
  if (!error->signatures.empty()) details["signatures"] = error->signatures;
  return details;
}

}  // namespace jaxring
