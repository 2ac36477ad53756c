#include "xla_ffi/communicator/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "xla_ffi/core/text.h"

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
      in_process_(spec_.world_size()),
      latest_launch_(spec_.world_size()),
      open_tickets_(spec_.world_size(), 0),
      left_(spec_.world_size(), false),
      seats_(spec_.world_size()),
      offers_(spec_.world_size()),
      flight_(spec_.world_size()) {
  process_count_ = 1 + *std::max_element(spec_.processes.begin(), spec_.processes.end());
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (is_local(rank)) local_ranks_.push_back(rank);
  }
  share_cores(spec_.world_size());
}

// How waits spin where so many ranks have this host's cores: with 2 ranks on 2 cores a call of 16 B
// to 16 K takes 8 to 17 us instead of 8 to 60, with 4 one of 512 B 75 instead of 160; with 8 ranks
// spinning took up to twice as long as sleeping.
void Communicator::share_cores(int64_t ranks) {
  const int64_t cores = sysconf(_SC_NPROCESSORS_ONLN);
  spin_ = std::chrono::microseconds(ranks <= 2 * cores ? 300 : 0);
}

Communicator::~Communicator() { close(); }

void Communicator::set_hosts(const std::vector<int>& by_rank) {
  std::lock_guard<std::mutex> lock(mutex_);
  hosts_ = std::make_unique<const HostLayout>(by_rank);
}

std::string Communicator::listen(const std::vector<int>& hosts, const std::string& provider,
                                 const std::string& interface, const std::string& secret) {
  LinksSpec links;
  links.name = spec_.key;
  links.processes = spec_.processes;
  links.hosts.resize(process_count_);
  links.self_process = spec_.self_process;
  links.provider = provider;
  links.interface = interface;
  links.secret = secret;
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    links.hosts[spec_.processes[rank]] = hosts.at(rank);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  hosts_ = std::make_unique<const HostLayout>(hosts);
  share_cores(std::count(hosts.begin(), hosts.end(), hosts[spec_.self_rank()]));
  process_hosts_ = links.hosts;
  if (!hosts_->shares_hosts()) slice_bytes_ = kLinkSliceBytes;  // every FIFO crosses a link
  links.slice_bytes = slice_bytes_;
  links_ = make_links(std::move(links));
  return links_->address();
}

void Communicator::connect(const std::vector<std::string>& addresses) {
  std::vector<std::string> by_process(process_count_);
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    by_process[spec_.processes[rank]] = addresses.at(rank);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  remote_owner_->connect(by_process);
}

void Communicator::attach(std::shared_ptr<Segment> segment) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (remote_owner_) return;
  remote_owner_ = std::make_unique<ShmTransport>(std::move(segment), spec_.self_process,
                                                 std::move(links_), process_hosts_);
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

std::optional<Error> Communicator::broken_anywhere() {
  ShmTransport* remote = remote_.load(std::memory_order_acquire);
  if (remote != nullptr && remote->alarm_raised()) poll_records();
  return broken();
}

void Communicator::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    tell_leaving();
  }
  linger(std::chrono::seconds(2), false);
  Error error = error_of_this_process(ErrorKind::kAbortedError);
  error.message = "communicator " + spec_.key + " was closed on rank " +
                  std::to_string(error.rank) + " (pid " + std::to_string(error.pid) + " on " +
                  error.host + ") while operations were under way there";
  std::vector<Finished> finished;
  std::thread progress;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // Others have been told that we leave; that somebody here still waited is an error for them
    // too.
    const bool busy = waits_here();
    stopping_ = true;
    fail_locked(error, busy, &finished);
    progress.swap(progress_thread_);
    news_.notify_all();
    if (ShmTransport* remote = remote_.load(std::memory_order_acquire)) {
      remote->wake(spec_.self_process);  // where the progress thread may sleep
    }
  }
  complete(std::move(finished));
  if (progress.joinable()) progress.join();
  if (ShmTransport* remote = remote_.load(std::memory_order_acquire)) remote->disconnect();
}

void Communicator::abort(const std::string& reason) {
  Error error = error_of_this_process(ErrorKind::kAbortedError);
  error.message = on_one_line(reason);
  fail(std::move(error));
}

Error Communicator::error_of_this_process(ErrorKind kind) const {
  Error error;
  error.kind = kind;
  error.rank = local_ranks_.front();
  error.pid = getpid();
  error.host = host_name();
  return error;
}

std::string Communicator::host_name() {
  char name[256] = "";
  return gethostname(name, sizeof name - 1) == 0 ? name : "";
}

bool Communicator::has_left(int process) const {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (spec_.processes[rank] == process && !left_[rank]) return false;
  }
  return true;
}

// Of those that a rank of this process waits for. Under mutex_.
Communicator::Operation Communicator::oldest_of_ours() const {
  Operation oldest;
  for (const auto& [key, operation] : table_) {
    if (operation->ticket_count == 0 || operation->finished) continue;
    if (!oldest || key < oldest->key) oldest = operation;
  }
  return oldest;
}

bool Communicator::waits_here() const {
  return std::any_of(open_tickets_.begin(), open_tickets_.end(), [](int n) { return n > 0; });
}

void Communicator::linger(std::chrono::milliseconds at_most, bool for_operations) {
  const Clock::time_point deadline = Clock::now() + at_most;
  while (Clock::now() < deadline) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      flush_outbox();
      const bool unsent = !outbox_.empty() && remote_.load(std::memory_order_acquire) != nullptr;
      const bool unfinished = for_operations && waits_here();
      if (broken_ || (!unsent && !unfinished)) return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::vector<StatsRow> Communicator::stats(bool reset) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<StatsRow> rows;
  const char* transport = name_of(!process_hosts_.empty() ? TransportKind::kLibfabric
                                  : spans_processes()     ? TransportKind::kSharedMemory
                                                          : TransportKind::kInProcess);
  for (const auto& [call, counters] : stats_) {
    rows.push_back(StatsRow{name_of(call.first), std::string(info_of(call.second).name), transport,
                            spec_.key, counters.operations, counters.bytes_sent,
                            counters.bytes_received, counters.wait_s});
  }
  if (reset) stats_.clear();
  return rows;
}

std::vector<FlightEntry> Communicator::flight() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return flight_.entries();
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
