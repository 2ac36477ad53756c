// The rank of this process and the size of its world, as numbers that a program reads when it runs:
// it need not be compiled again when a world has lost or won ranks.
#include <string>
#include <string_view>

#include "xla_ffi/communicator/registry.h"
#include "xla_ffi/ffi/attributes.h"
#include "xla_ffi/ffi/handlers.h"

namespace jaxring {
namespace {

namespace ffi = xla::ffi;

ffi::Error place(std::string_view key, ffi::ResultBufferR0<ffi::S32> rank,
                 ffi::ResultBufferR0<ffi::S32> world_size) {
  const auto communicator = Registry::instance().find(std::string(key));
  if (!communicator) {
    Error error;
    error.message = "axis_index: communicator " + std::string(key) +
                    " is closed; make a new one with jaxring.init()";
    return to_ffi(error);
  }
  *rank->typed_data() = communicator->spec().self_rank();
  *world_size->typed_data() = communicator->spec().world_size();
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxring

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxring_place, jaxring::place,
                              xla::ffi::Ffi::Bind()
                                  .Attr<std::string_view>("communicator")
                                  .Ret<xla::ffi::BufferR0<xla::ffi::S32>>()
                                  .Ret<xla::ffi::BufferR0<xla::ffi::S32>>());
