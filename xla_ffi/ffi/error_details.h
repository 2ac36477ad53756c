// The typed error behind a text that came through XLA, for Python.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace jaxring {

// A dict of the error's fields, or None when no recent error has this text.
nanobind::object error_details(const std::string& message);

}  // namespace jaxring
