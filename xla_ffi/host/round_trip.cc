#include "xla_ffi/host/round_trip.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "xla_ffi/core/macros.h"
#include "xla_ffi/host/wait.h"

namespace jaxring {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTrials = 15;
constexpr int kTrips = 2000;
constexpr int kSpins = 5000;  // then the other one may need this core
constexpr int kStop = -1;
// Where others want the cores, each trip may cost a turn of the scheduler.
constexpr std::chrono::milliseconds kLongest{50};

struct alignas(JR_CACHE_LINE) Word {
  std::atomic<int> value{0};

  // False if the other one stopped or time is up.
  bool await(int wanted, Clock::time_point deadline) const {
    for (int spins = 0;; ++spins) {
      const int seen = value.load(std::memory_order_acquire);
      if (seen == wanted || seen == kStop) return seen == wanted;
      if (spins < kSpins) {
        cpu_pause();
        continue;
      }
      if (Clock::now() > deadline) return false;
      std::this_thread::yield();
    }
  }
};

}  // namespace

double cache_line_round_trip_ns() {
  if (std::thread::hardware_concurrency() < 2) return 0;
  const auto begin = Clock::now(), deadline = begin + kLongest;
  Word ping, pong;
  std::thread other([&] {
    for (int trip = 1; ping.await(trip, deadline); ++trip) {
      pong.value.store(trip, std::memory_order_release);
    }
    pong.value.store(kStop, std::memory_order_release);
  });
  std::vector<double> trials_ns;
  auto start = begin;
  int trip = 0;
  while (trip < kTrials * kTrips) {
    ping.value.store(++trip, std::memory_order_release);
    if (!pong.await(trip, deadline)) break;
    if (trip % kTrips != 0) continue;
    const auto end = Clock::now();
    trials_ns.push_back(std::chrono::duration<double, std::nano>(end - start).count() / kTrips);
    start = end;
  }
  ping.value.store(kStop, std::memory_order_release);
  other.join();
  if (trials_ns.empty()) {
    return std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / trip;
  }
  const auto median = trials_ns.begin() + trials_ns.size() / 2;
  std::nth_element(trials_ns.begin(), median, trials_ns.end());
  return *median;
}

}  // namespace jaxring
