#include "xla_ffi/communicator/flight_recorder.h"

#include <gtest/gtest.h>

namespace jaxring {
namespace {

Key key_of(uint32_t launch) {
  Key key;
  key.launch = launch;
  return key;
}

TEST(FlightRecorder, KeepsTheLastOperationsOfEachRank) {
  FlightRecorder recorder(2);
  const auto info = std::make_shared<CallInfo>();
  for (uint32_t launch = 0; launch < 1100; ++launch) {
    recorder.arrived(1, key_of(launch), info, Clock::now());
  }
  recorder.arrived(0, key_of(7), info, Clock::now());
  const std::vector<FlightEntry> entries = recorder.entries();
  ASSERT_EQ(entries.size(), 1001u);
  EXPECT_EQ(entries[0].rank, 0);
  EXPECT_EQ(entries[1].number, 100u);
  EXPECT_EQ(entries.back().number, 1099u);
}

TEST(FlightRecorder, TellsWhatIsUnderWayAndHowOthersEnded) {
  FlightRecorder recorder(1);
  const auto info = std::make_shared<CallInfo>();
  for (uint32_t launch = 0; launch < 3; ++launch) {
    recorder.arrived(0, key_of(launch), info, Clock::now());
  }
  EXPECT_EQ(recorder.last_done(0), nullptr);
  recorder.finished(0, key_of(0), Clock::now(), Clock::now(), "done");
  recorder.finished(0, key_of(1), Clock::time_point{}, Clock::now(), "TimeoutError");
  const std::vector<FlightEntry> entries = recorder.entries();
  EXPECT_EQ(entries[0].outcome, "done");
  EXPECT_EQ(entries[1].outcome, "TimeoutError");
  EXPECT_EQ(entries[1].ready, Clock::time_point{});
  EXPECT_EQ(entries[2].outcome, "");
  EXPECT_EQ(entries[2].finished, Clock::time_point{});
  EXPECT_EQ(recorder.last_done(0)->key.launch, 0u);
}

}  // namespace
}  // namespace jaxring
