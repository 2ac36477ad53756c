// The XLA FFI handlers of the one custom call target, "jaxring_collective".
#pragma once

#include "xla/ffi/api/ffi.h"

extern "C" XLA_FFI_Error* jaxring_instantiate(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxring_execute(XLA_FFI_CallFrame* call_frame);
