// The kinds of error a collective can end with, listed once: Python builds its classes from this
// list.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace jaxring {

#define JR_ERROR_KINDS(X)                                                 \
  X(UsageError)    /* the call cannot work as written */                  \
  X(MismatchError) /* ranks disagree about what they are doing */         \
  X(TimeoutError)  /* a rank did not come within the deadline */          \
  X(PeerError)     /* a rank's process died or closed its communicator */ \
  X(AbortedError)  /* somebody called abort() */

enum class ErrorKind : uint8_t {
#define JR_KIND(name) k##name,
  JR_ERROR_KINDS(JR_KIND)
#undef JR_KIND
};

#define JR_KIND(name) +1
inline constexpr int kErrorKindCount = 0 JR_ERROR_KINDS(JR_KIND);
#undef JR_KIND

inline std::string_view name_of(ErrorKind kind) {
  switch (kind) {
#define JR_KIND(name)      \
  case ErrorKind::k##name: \
    return #name;
    JR_ERROR_KINDS(JR_KIND)
#undef JR_KIND
  }
  return "Error";
}

// What went wrong, for a human (message) and for a program (the fields that apply).
struct Error {
  ErrorKind kind = ErrorKind::kUsageError;
  std::string message;
  std::vector<int> missing_ranks;
  int rank = -1;  // the rank the error is about, not the one that raises it
  std::string host;
  int64_t pid = 0;
  std::string call;
  int64_t sequence = -1;  // launch ordinal
  std::vector<std::string> signatures;

  // The text that travels through XLA; jaxring.errors.from_exception finds the kind again.
  std::string text() const { return "jaxring." + std::string(name_of(kind)) + ": " + message; }
};

}  // namespace jaxring
