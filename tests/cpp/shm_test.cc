#include "xla_ffi/transport/shm.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>

namespace jaxring {
namespace {

// Two mappings of one segment, as two processes have them.
void expect_shared(const std::shared_ptr<Segment>& leader) {
  const std::shared_ptr<Segment> other = Segment::attach(leader->address(), 2, 2);
  std::memcpy(leader->fifo(0, 1, 0).slot(0), "slot", 5);
  EXPECT_STREQ(other->fifo(0, 1, 0).slot(0), "slot");
  leader->fifo(0, 1, 0).counters->produced.store(7);
  EXPECT_EQ(other->fifo(0, 1, 0).counters->produced.load(), 7u);
}

TEST(Segment, IsSharedByMemfd) { expect_shared(Segment::create(2, 2)); }

// What a container that forbids memfd_create gets.
TEST(Segment, IsSharedByAnUnnamedFileOtherwise) {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / "jaxring_shm_test";
  std::filesystem::create_directories(folder);
  setenv("TMPDIR", folder.c_str(), 1);
  expect_shared(Segment::create(2, 2, /*with_memfd=*/false));
  EXPECT_TRUE(std::filesystem::is_empty(folder));  // nothing to leave behind
  unsetenv("TMPDIR");
  std::filesystem::remove(folder);
}

TEST(Segment, WithoutRoomItIsAnErrorAtOnceAndNotASigbusLater) {
  const auto ignored = std::signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  setrlimit(RLIMIT_FSIZE, &small);
  try {
    Segment::create(2, 2, /*with_memfd=*/false);
    ADD_FAILURE() << "no error";
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("could not size its shared memory to"),
              std::string::npos)
        << error.what();
  }
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, ignored);
}

TEST(Segment, AStrangersAddressIsRefused) {
  const std::shared_ptr<Segment> leader = Segment::create(2, 2);
  const std::string address = leader->address();
  const std::string forged = address.substr(0, address.rfind(' ')) + " 1234";
  EXPECT_THROW(Segment::attach(forged, 2, 2), std::runtime_error);
  EXPECT_THROW(Segment::attach(address, 3, 3), std::runtime_error);
  EXPECT_THROW(Segment::attach("nonsense", 2, 2), std::runtime_error);
  EXPECT_THROW(Segment::attach("1 0 0", 2, 2), std::runtime_error);  // init's standard input
}

}  // namespace
}  // namespace jaxring
