// The XLA FFI handlers of the custom call targets: "jaxring_collective", and "jaxring_place", which
// reads rank and world size.
#pragma once

#include "xla/ffi/api/ffi.h"

extern "C" XLA_FFI_Error* jaxring_instantiate(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxring_execute(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxring_place(XLA_FFI_CallFrame* call_frame);
