#include "xla_ffi/communicator/error_payload.h"

#include <gtest/gtest.h>

namespace jaxring {
namespace {

Error full_error() {
  Error error;
  error.kind = ErrorKind::kPeerError;
  error.message = "the process of rank 3 has died";
  error.missing_ranks = {3, 7};
  error.rank = 3;
  error.host = "node0";
  error.pid = 4711;
  error.call = "allreduce 'loss'";
  error.sequence = 12;
  error.signatures = {"allreduce(sum, float32[4])", ""};
  return error;
}

TEST(ErrorPayload, KeepsAllThatAProgramCanAsk) {
  const std::string payload = to_payload(full_error());
  const std::optional<Error> error = error_from_payload(payload.data(), payload.size());
  ASSERT_TRUE(error);
  EXPECT_EQ(error->text(), full_error().text());
  EXPECT_EQ(error->missing_ranks, full_error().missing_ranks);
  EXPECT_EQ(error->rank, 3);
  EXPECT_EQ(error->host, "node0");
  EXPECT_EQ(error->pid, 4711);
  EXPECT_EQ(error->call, "allreduce 'loss'");
  EXPECT_EQ(error->sequence, 12);
  EXPECT_EQ(error->signatures, full_error().signatures);
}

TEST(ErrorPayload, CutsLongTexts) {
  Error error = full_error();
  error.message.assign(1 << 20, 'x');
  error.missing_ranks.assign(100000, 1);
  const std::string payload = to_payload(error);
  EXPECT_LT(payload.size(), size_t{16} << 10);
  EXPECT_TRUE(error_from_payload(payload.data(), payload.size()));
}

TEST(ErrorPayload, TakesNothingElse) {
  const std::string payload = to_payload(full_error());
  for (size_t bytes = 0; bytes < payload.size(); ++bytes) {
    EXPECT_FALSE(error_from_payload(payload.data(), bytes)) << bytes;
  }
  const std::string longer = payload + "x";
  EXPECT_FALSE(error_from_payload(longer.data(), longer.size()));
  for (size_t i = 0; i < payload.size(); ++i) {  // whatever it is then, reading it does no harm
    std::string changed = payload;
    changed[i] = static_cast<char>(0xff);
    error_from_payload(changed.data(), changed.size());
  }
}

}  // namespace
}  // namespace jaxring
