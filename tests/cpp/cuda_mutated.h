// Applies the mutation that the environment variable JR_MUTATION names (xla_ffi/cuda/mutation.h) to
// the whole program; see tests/cuda/mutations.py.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

#include "xla_ffi/cuda/mutation.h"

#if defined(JR_MUTATIONS)
namespace jaxring::testing {

inline const bool kMutated = [] {
  const char* wanted = std::getenv("JR_MUTATION");
  if (wanted == nullptr) return false;
  const std::string name = wanted;
#define JR_X(enumerator, what)                           \
  if (name == #enumerator) {                             \
    cuda::current_mutation = cuda::Mutation::enumerator; \
    std::printf("mutated: without %s\n", what);          \
    return true;                                         \
  }
  JR_FOR_EACH_MUTATION(JR_X)
#undef JR_X
  std::fprintf(stderr, "JR_MUTATION=%s is not in xla_ffi/cuda/mutation.h\n", wanted);
  std::exit(2);
}();

}  // namespace jaxring::testing
#endif
