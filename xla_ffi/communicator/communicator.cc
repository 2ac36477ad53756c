#include "xla_ffi/communicator/communicator.h"

#include <algorithm>
#include <stdexcept>

namespace jaxring {
namespace {

CommunicatorSpec numbered_from_zero(CommunicatorSpec spec) {
  std::map<int, int> numbers;
  for (int& process : spec.processes) {
    process = numbers.emplace(process, static_cast<int>(numbers.size())).first->second;
  }
  const auto self = numbers.find(spec.self_process);
  if (self == numbers.end()) throw std::invalid_argument("no rank of " + spec.key + " lives here");
  spec.self_process = self->second;
  return spec;
}

}  // namespace

Communicator::Communicator(CommunicatorSpec spec)
    : spec_(numbered_from_zero(std::move(spec))),
      latest_launch_(spec_.world_size()),
      open_tickets_(spec_.world_size(), 0) {
  process_count_ = 1 + *std::max_element(spec_.processes.begin(), spec_.processes.end());
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (is_local(rank)) local_ranks_.push_back(rank);
  }
}

Communicator::~Communicator() { close(); }

void Communicator::attach(std::shared_ptr<Segment> segment) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (remote_owner_) return;
  remote_owner_ = std::make_unique<ShmTransport>(std::move(segment), spec_.self_process);
  remote_.store(remote_owner_.get(), std::memory_order_release);
  flush_outbox();
  news_.notify_all();
}

bool Communicator::all_attached() const {
  if (!spans_processes()) return true;
  const ShmTransport* remote = remote_.load(std::memory_order_acquire);
  return remote != nullptr && remote->all_attached();
}

std::optional<Error> Communicator::broken() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return broken_;
}

void Communicator::close() {
  linger(std::chrono::seconds(2), false);
  Error error;
  error.kind = ErrorKind::kAbortedError;
  error.message = "communicator " + spec_.key + " was closed on this rank";
  std::vector<Finished> finished;
  std::thread progress;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // Others are told only if somebody here still waited; otherwise they learn it when they next
    // need us.
    const bool busy = !table_.empty();
    fail_locked(error, busy, &finished);
    stopping_ = true;
    progress.swap(progress_thread_);
    news_.notify_all();
  }
  complete(std::move(finished));
  if (progress.joinable()) progress.join();
}

void Communicator::linger(std::chrono::milliseconds at_most, bool for_operations) {
  const Clock::time_point deadline = Clock::now() + at_most;
  while (Clock::now() < deadline) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      flush_outbox();
      const bool unsent = !outbox_.empty() && remote_.load(std::memory_order_acquire) != nullptr;
      const bool unfinished = for_operations && handed_over_ > 0;
      if (broken_ || (!unsent && !unfinished)) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<StatsRow> Communicator::stats(bool reset) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StatsRow> rows;
  for (const auto& [key, row] : stats_) {
    StatsRow named = row;
    std::tie(named.collective, named.algorithm) = key;
    named.communicator = spec_.key;
    named.transport =
        name_of(spans_processes() ? TransportKind::kSharedMemory : TransportKind::kInProcess);
    rows.push_back(std::move(named));
  }
  if (reset) stats_.clear();
  return rows;
}

Sender& Communicator::sender(int from_rank, int to_rank, int channel) {
  if (is_local(to_rank)) return in_process_.sender(from_rank, to_rank, channel);
  return remote_.load(std::memory_order_acquire)->sender(from_rank, to_rank, channel);
}

Receiver& Communicator::receiver(int from_rank, int to_rank, int channel) {
  if (is_local(from_rank)) return in_process_.receiver(from_rank, to_rank, channel);
  return remote_.load(std::memory_order_acquire)->receiver(from_rank, to_rank, channel);
}

void Communicator::notify(int rank) {
  if (is_local(rank)) return;  // its pipelines are advanced by whoever drives this process
  remote_.load(std::memory_order_acquire)->wake(spec_.processes[rank]);
}

}  // namespace jaxring
