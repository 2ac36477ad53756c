#if !JAXRING_HAS_LIBFABRIC
#include <stdexcept>

#include "xla_ffi/transport/links.h"

namespace jaxring {

std::unique_ptr<Links> make_links(LinksSpec) {
  throw std::runtime_error(
      "ranks are on different hosts, and this jaxring was built without libfabric's headers; "
      "install them (Debian, Ubuntu: apt-get install libfabric-dev) and jaxring again (pip install "
      "--force-reinstall --no-cache-dir jaxring) on every host");
}

}  // namespace jaxring
#endif
