#include "xla_ffi/communicator/error_payload.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "xla_ffi/core/text.h"

namespace jaxring {
namespace {

constexpr size_t kLongestText = 4096;
constexpr size_t kMostEntries = 64;

class Writer {
 public:
  void number(int64_t value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out_.append(bytes, sizeof value);
  }
  void text(const std::string& value) {
    const std::string kept = first_bytes(value, kLongestText);
    number(static_cast<int64_t>(kept.size()));
    out_ += kept;
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

// Once something does not fit, nothing does: ok() is looked at in the end.
class Reader {
 public:
  Reader(const char* data, size_t bytes) : data_(data), left_(bytes) {}

  int64_t number() {
    int64_t value = 0;
    if (left_ < sizeof value) return fail();
    std::memcpy(&value, data_, sizeof value);
    advance(sizeof value);
    return value;
  }
  std::string text() {
    const size_t length = count(kLongestText);
    if (length > left_) return fail(), std::string();
    std::string value(data_, length);
    advance(length);
    return value;
  }
  size_t count(size_t most) {
    const int64_t value = number();
    return value < 0 || static_cast<size_t>(value) > most ? fail() : static_cast<size_t>(value);
  }
  bool ok() const { return ok_ && left_ == 0; }

 private:
  int fail() {
    ok_ = false;
    left_ = 0;
    return 0;
  }
  void advance(size_t bytes) {
    data_ += bytes;
    left_ -= bytes;
  }

  const char* data_;
  size_t left_;
  bool ok_ = true;
};

}  // namespace

std::string to_payload(const Error& error) {
  Writer out;
  out.number(static_cast<int64_t>(error.kind));
  out.text(error.message);
  out.number(error.rank);
  out.text(error.host);
  out.number(error.pid);
  out.text(error.call);
  out.number(error.sequence);
  const size_t missing = std::min(error.missing_ranks.size(), kMostEntries);
  out.number(static_cast<int64_t>(missing));
  for (size_t i = 0; i < missing; ++i) out.number(error.missing_ranks[i]);
  const size_t signatures = std::min<size_t>(error.signatures.size(), 8);
  out.number(static_cast<int64_t>(signatures));
  for (size_t i = 0; i < signatures; ++i) out.text(error.signatures[i]);
  return out.take();
}

std::optional<Error> error_from_payload(const char* data, size_t bytes) {
  Reader in(data, bytes);
  Error error;
  const int64_t kind = in.number();
  if (kind < 0 || kind >= kErrorKindCount) return std::nullopt;
  error.kind = static_cast<ErrorKind>(kind);
  error.message = in.text();
  error.rank = static_cast<int>(in.number());
  error.host = in.text();
  error.pid = in.number();
  error.call = in.text();
  error.sequence = in.number();
  for (size_t left = in.count(kMostEntries); left > 0; --left) {
    error.missing_ranks.push_back(static_cast<int>(in.number()));
  }
  for (size_t left = in.count(kMostEntries); left > 0; --left) {
    error.signatures.push_back(in.text());
  }
  if (!in.ok()) return std::nullopt;
  return error;
}

}  // namespace jaxring
