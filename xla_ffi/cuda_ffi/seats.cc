#include "xla_ffi/cuda_ffi/seats.h"

#include <cstring>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "xla_ffi/communicator/events.h"
#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/cuda_ffi/seat_exchange.h"
#include "xla_ffi/cuda_ffi/watchdog.h"

namespace jaxring::cuda {
namespace {

template <typename T>
std::string bytes_of(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

template <typename T>
std::vector<T> values_of(const std::vector<std::string>& texts) {
  static_assert(sizeof(T) <= kTextBytes);
  std::vector<T> values(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) std::memcpy(&values[i], texts[i].data(), sizeof(T));
  return values;
}

// One row for what differs in numbers only: the ranks of this process, calls of other sizes.
std::vector<StatsRow> merged(const std::vector<StatsRow>& rows) {
  std::map<std::tuple<std::string, std::string, std::string, std::string>, StatsRow> by_kind;
  for (const StatsRow& row : rows) {
    const auto [found, is_new] = by_kind.emplace(
        std::tuple(row.communicator, row.collective, row.algorithm, row.transport), row);
    if (is_new) continue;
    found->second.operations += row.operations;
    found->second.bytes_sent += row.bytes_sent;
    found->second.bytes_received += row.bytes_received;
  }
  std::vector<StatsRow> result;
  for (auto& [kind, row] : by_kind) result.push_back(std::move(row));
  return result;
}

std::runtime_error no_communicator(const std::string& key) {
  return std::runtime_error("communicator " + key +
                            " has not been set up on this GPU; was this program compiled in "
                            "another process? Lower it here once, with jax.jit");
}

}  // namespace

Seats& Seats::instance() {
  static Seats& seats = *new Seats;
  return seats;
}

std::shared_ptr<Seat> Seats::of_clique(const std::string& key, NcclComm clique, int device) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = by_clique_.find(clique);
    if (found != by_clique_.end() && found->second->key() == key) return found->second;
  }
  // Not under the lock: the clique's other devices in this process are on their way here too.
  std::string why_not;
  const Nccl* nccl = backend().nccl(&why_not);
  if (nccl == nullptr) throw std::runtime_error(why_not);
  int rank = 0, world_size = 0;
  if (Failure f = nccl_failure(*nccl, nccl->comm_user_rank(clique, &rank), "ncclCommUserRank")) {
    throw std::runtime_error(*f);
  }
  if (Failure f = nccl_failure(*nccl, nccl->comm_count(clique, &world_size), "ncclCommCount")) {
    throw std::runtime_error(*f);
  }
  auto seat = std::make_shared<Seat>(key, rank, world_size, device);
  SeatExchange exchange(*seat);
  const auto gather = [&](const auto& value) {
    return exchange.by_nccl(*nccl, clique, bytes_of(value));
  };
  const uint64_t mapped = seat->map(values_of<Card>(gather(seat->card())));
  seat->decide(values_of<uint64_t>(gather(mapped)), nccl, clique);
  seat->join_multicast(
      [&](const std::string& text) { return exchange.by_nccl(*nccl, clique, text); });
  if (seat->plan().reach != Reach::kMapped && rank == 0) {
    Events::instance().post({"note", "communicator " + key + " goes by " + seat->transport() +
                                         ", since " + seat->plan().reason});
  }
  std::lock_guard<std::mutex> lock(mutex_);
  by_clique_[clique] = seat;
  Watchdog::instance().start();
  return seat;
}

void Seats::create(const std::string& key, const std::vector<int>& ranks,
                   const std::vector<int>& devices, int world_size) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (by_key_.count({key, ranks[i]}) != 0) continue;
    }
    auto seat = std::make_shared<Seat>(key, ranks[i], world_size, devices[i]);
    std::lock_guard<std::mutex> lock(mutex_);
    by_key_.emplace(std::make_pair(key, ranks[i]), std::move(seat));
  }
  Watchdog::instance().start();
}

std::vector<std::shared_ptr<Seat>> Seats::of_key(const std::string& key) const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Seat>> seats;
  for (const auto& [name, seat] : by_key_) {
    if (name.first == key) seats.push_back(seat);
  }
  return seats;
}

std::vector<Card> Seats::cards(const std::string& key) {
  std::vector<Card> cards;
  for (const auto& seat : of_key(key)) cards.push_back(seat->card());
  return cards;
}

std::vector<uint64_t> Seats::map(const std::string& key, const std::vector<Card>& cards) {
  std::vector<uint64_t> mapped;
  for (const auto& seat : of_key(key)) {
    if (static_cast<int>(cards.size()) != seat->world_size()) {
      throw std::runtime_error("communicator " + key + ": expected " +
                               std::to_string(seat->world_size()) + " ranks, got " +
                               std::to_string(cards.size()));
    }
    mapped.push_back(seat->map(cards));
  }
  return mapped;
}

void Seats::decide(const std::string& key, const std::vector<uint64_t>& mapped) {
  for (const auto& seat : of_key(key)) seat->decide(mapped, nullptr, nullptr);
}

void Seats::fail(const std::string& key, const Error& error) {
  for (const auto& seat : of_key(key)) seat->fail(error);
  std::lock_guard<std::mutex> lock(mutex_);
  failed_.emplace(key, error);
  for (const auto& [clique, seat] : by_clique_) {
    if (seat->key() == key) seat->fail(error);
  }
}

std::string Seats::state(const std::string& key) {
  const auto seats = of_key(key);
  for (const auto& seat : seats) {
    if (std::optional<Error> error = seat->failure()) return "broken: " + error->text();
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto failed = failed_.find(key);
    if (failed != failed_.end()) return "broken: " + failed->second.text();
  }
  if (seats.empty()) return "missing";
  for (const auto& seat : seats) {
    if (!seat->ready()) return "connecting";
  }
  return "ready";
}

void Seats::close(const std::string& key) {
  // Used and released outside of the lock: that waits for the device.
  const std::vector<std::shared_ptr<Seat>> closed = of_key(key);
  const std::vector<StatsRow> rows = retire(closed);
  std::lock_guard<std::mutex> lock(mutex_);
  failed_.erase(key);
  closed_stats_.insert(closed_stats_.end(), rows.begin(), rows.end());
  for (const auto& seat : closed) by_key_.erase({key, seat->rank()});
}

void Seats::rejoin() {
  std::vector<std::shared_ptr<Seat>> old;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [clique, seat] : by_clique_) old.push_back(seat);
    by_clique_.clear();
  }
  const std::vector<StatsRow> rows = retire(old);
  std::lock_guard<std::mutex> lock(mutex_);
  closed_stats_.insert(closed_stats_.end(), rows.begin(), rows.end());
}

std::vector<StatsRow> Seats::retire(const std::vector<std::shared_ptr<Seat>>& seats) {
  std::vector<StatsRow> rows;
  for (const auto& seat : seats) {
    for (StatsRow& row : seat->stats(false)) rows.push_back(std::move(row));
    seat->retire();
  }
  return rows;
}

std::vector<StatsRow> Seats::stats(bool reset) {
  std::vector<StatsRow> rows;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    rows = closed_stats_;
    if (reset) closed_stats_.clear();
  }
  for (const auto& seat : all()) {
    for (StatsRow& row : seat->stats(reset)) rows.push_back(std::move(row));
  }
  return merged(rows);
}

std::shared_ptr<Seat> Seats::wait_for(const std::string& key, int rank) {
  const auto deadline = SetUpClock::now() + settings().timeout();
  for (;;) {
    std::shared_ptr<Seat> seat;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto failed = failed_.find(key);
      if (failed != failed_.end()) throw Failed{failed->second};
      const auto found = by_key_.lower_bound({key, rank});
      const bool here = found != by_key_.end() && found->first.first == key &&
                        (rank < 0 || found->first.second == rank);
      if (!here) throw no_communicator(key);
      seat = found->second;
    }
    if (std::optional<Error> error = seat->failure()) throw Failed{*error};
    if (seat->ready()) return seat;
    if (SetUpClock::now() >= deadline) {
      Error error;
      error.kind = ErrorKind::kTimeoutError;
      error.message = "communicator " + key +
                      " was not complete after timeout_s: other processes have not lowered this "
                      "program; see what they are doing, or raise timeout_s";
      throw Failed{error};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<std::shared_ptr<Seat>> Seats::all() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<Seat>> seats;
  for (const auto& [name, seat] : by_key_) seats.push_back(seat);
  for (const auto& [clique, seat] : by_clique_) seats.push_back(seat);
  return seats;
}

}  // namespace jaxring::cuda
