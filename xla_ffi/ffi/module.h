// The parts of the Python module that live in files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace jaxring {

void bind_records(nanobind::module_& m);     // module_records.cc
void bind_simulation(nanobind::module_& m);  // module_simulation.cc

}  // namespace jaxring
