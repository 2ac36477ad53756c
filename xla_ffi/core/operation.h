// What one collective call asks for, the same on every rank; its signature is compared between
// ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "xla_ffi/core/dtype.h"
#include "xla_ffi/core/reduce_op.h"

namespace jaxring {

// X(enumerator, name, whether it reduces)
#define JR_FOR_EACH_COLLECTIVE(X)           \
  X(kAllreduce, "allreduce", true)          \
  X(kReduceScatter, "reduce_scatter", true) \
  X(kAllGather, "all_gather", false)        \
  X(kAllToAll, "all_to_all", false)         \
  X(kBroadcast, "broadcast", false)         \
  X(kReduce, "reduce", true)                \
  X(kPermute, "ppermute", false)            \
  X(kBarrier, "barrier", false)

enum class Collective : uint8_t {
#define JR_X(enumerator, name, reduces) enumerator,
  JR_FOR_EACH_COLLECTIVE(JR_X)
#undef JR_X
};

constexpr const char* name_of(Collective collective) {
  switch (collective) {
#define JR_X(enumerator, name, reduces) \
  case Collective::enumerator:          \
    return name;
    JR_FOR_EACH_COLLECTIVE(JR_X)
#undef JR_X
  }
  return "unknown collective";
}

// Whether it combines values; the others only move them.
constexpr bool reduces(Collective collective) {
  switch (collective) {
#define JR_X(enumerator, name, reduces) \
  case Collective::enumerator:          \
    return reduces;
    JR_FOR_EACH_COLLECTIVE(JR_X)
#undef JR_X
  }
  return false;
}

constexpr std::optional<Collective> collective_from_name(std::string_view name) {
#define JR_X(enumerator, text, reduces) \
  if (name == text) return Collective::enumerator;
  JR_FOR_EACH_COLLECTIVE(JR_X)
#undef JR_X
  return std::nullopt;
}

// Identifies one execution of one call, without counting arrivals: XLA:CPU may run independent
// calls in different orders on different ranks, so the first to arrive here need not pair with the
// first there.
struct Key {
  uint32_t launch = 0;     // how many launches on this communicator came before, on this rank
  uint32_t call = 0;       // index of the call in its module, in program order
  uint32_t copy = 0;       // which of the copies XLA made of it (an inner jit called twice)
  uint32_t iteration = 0;  // how often this launch has run it before (a loop)

  bool operator==(const Key& other) const {
    return launch == other.launch && call == other.call && copy == other.copy &&
           iteration == other.iteration;
  }
  // In the order of the program, as far as a key tells.
  bool operator<(const Key& other) const {
    return std::tie(launch, iteration, call, copy) <
           std::tie(other.launch, other.iteration, other.call, other.copy);
  }
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    uint64_t h = (uint64_t{key.launch} << 32 | key.call) * 0x9E3779B97F4A7C15u;
    h ^= (uint64_t{key.copy} << 32 | key.iteration) * 0xC2B2AE3D27D4EB4Fu;
    return static_cast<size_t>(h ^ (h >> 29));
  }
};

// FNV-1a over a text; 64 bits, enough to tell signatures apart when ranks compare them.
inline uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xCBF29CE484222325u;
  for (unsigned char c : text) hash = (hash ^ c) * 0x100000001B3u;
  return hash;
}

// What every rank of a call must agree on, readable, with its hash.
struct Signature {
  std::string text;  // e.g. "allreduce(sum, float32[3,4] float32[7], algorithm=ring)"
  uint64_t hash = 0;

  explicit Signature(std::string t) : text(std::move(t)), hash(hash_of(text)) {}
};

}  // namespace jaxring
