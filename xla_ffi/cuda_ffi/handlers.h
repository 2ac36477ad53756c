// The XLA FFI handlers of the custom call "jaxring_collective" on platform CUDA.
#pragma once

#include "xla/ffi/api/ffi.h"

extern "C" XLA_FFI_Error* jaxring_cuda_instantiate(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxring_cuda_prepare(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxring_cuda_initialize(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxring_cuda_execute(XLA_FFI_CallFrame* call_frame);
