// How an error travels from one process to the others: all that a program can ask of it, so that
// every rank raises the same.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "xla_ffi/core/error.h"

namespace jaxring {

// At most a few KiB: long texts are cut.
std::string to_payload(const Error& error);

// Empty if the bytes are no error; they come from another process.
std::optional<Error> error_from_payload(const char* data, size_t bytes);

}  // namespace jaxring
