#if JAXRING_HAS_LIBFABRIC
#include "xla_ffi/transport/ofi_links.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace jaxring {
namespace {

constexpr int64_t kInboxBytes = 1 << 20;
constexpr auto kGoodbyePatience = std::chrono::seconds(5);
constexpr int kWatchInterval_ms = 200;
constexpr int kPolledInterval_ms = 1;

// In the place of ends that could not be made: never ready.
struct DumbSender final : Sender {
  void* try_reserve() override { return nullptr; }
  void publish(int64_t /*bytes*/) override {}
};
struct DumbReceiver final : Receiver {
  const void* try_peek() override { return nullptr; }
  void release() override {}
};

}  // namespace

std::unique_ptr<Links> make_links(LinksSpec spec) {
  return std::make_unique<OfiLinks>(std::move(spec));
}

OfiLinks::OfiLinks(LinksSpec spec)
    : spec_(std::move(spec)),
      fabric_(spec_.provider, spec_.interface),
      buffers_(fabric_.domain(), fabric_.registers_memory()),
      home_(spec_, buffers_),
      senders_(static_cast<int>(spec_.processes.size())),
      receivers_(static_cast<int>(spec_.processes.size())) {
  for (int process = 0; process < spec_.process_count(); ++process) {
    if (!spec_.is_remote(process)) continue;
    OfiLink::Home::Inbox& inbox = home_.inboxes[process];
    inbox.memory = {static_cast<char*>(std::aligned_alloc(JR_CACHE_LINE, kInboxBytes)), &std::free};
    if (!inbox.memory) throw std::bad_alloc();
    std::memset(inbox.memory.get(), 0, kInboxBytes);
    inbox.ring = RecordRing(inbox.memory.get(), kInboxBytes);
  }
  bell_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
}

OfiLinks::~OfiLinks() {
  disconnect();
  links_.clear();
  dropped_.clear();
  if (bell_fd_ >= 0) close(bell_fd_);
}

void OfiLinks::disconnect() {
  if (!thread_.joinable()) return;
  say_goodbye();
  stopping_ = true;
  ring_bell();
  thread_.join();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& link : links_) link->hang_up();
}

void OfiLinks::bind(RecordRing own, std::vector<RecordCursor*> cursors,
                    std::function<void()> wake) {
  home_.own_records = own;
  home_.cursors = std::move(cursors);
  wake_ = std::move(wake);
}

void OfiLinks::connect(const std::vector<std::string>& addresses) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (int process = 0; process < spec_.self_process; ++process) {
    if (!spec_.is_remote(process)) continue;
    auto link = std::make_unique<OfiLink>(home_, process);
    link->opened(fabric_.open(addresses.at(process), link.get()));
    fabric_.connect(link->endpoint(), addresses[process]);
    home_.by_process[process].store(link.get(), std::memory_order_release);
    links_.push_back(std::move(link));
  }
  thread_ = std::thread([this] { watch(); });
}

OfiLink& OfiLinks::link_of_rank(int rank) const {
  OfiLink* link = link_to(spec_.processes[rank]);
  if (link == nullptr) throw std::logic_error("a FIFO was used before its link was there");
  return *link;
}

void OfiLinks::note_failure(const char* what) {
  if (failing_.exchange(true)) return;  // the first reason counts
  std::snprintf(what_failed_, sizeof what_failed_, "%s", what);
  failed_.store(true, std::memory_order_release);
}

std::string OfiLinks::failure() const {
  return failed_.load(std::memory_order_acquire) ? what_failed_ : "";
}

Sender& OfiLinks::sender(int from_rank, int to_rank, int channel) try {
  bool made = false;
  auto make = [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    LinkSender& end = link_of_rank(to_rank).add_sender(from_rank, to_rank, channel);
    made = true;
    return std::unique_ptr<SenderEnd>(new SenderEnd{end});
  };
  SenderEnd& sender = senders_.get(from_rank, to_rank, channel, make);
  if (made) progress();  // others may have asked for it meanwhile
  return sender.end;
} catch (const std::exception& e) {
  static DumbSender dumb;
  note_failure(e.what());
  return dumb;
}

Receiver& OfiLinks::receiver(int from_rank, int to_rank, int channel) try {
  bool made = false;
  ReceiverEnd& receiver = receivers_.get(from_rank, to_rank, channel, [&] {
    std::lock_guard<std::mutex> lock(mutex_);
    LinkReceiver& end = link_of_rank(from_rank).add_receiver(from_rank, to_rank, channel);
    made = true;
    return std::unique_ptr<ReceiverEnd>(new ReceiverEnd{end});
  });
  if (made) progress();  // tells the sender that it may begin
  return receiver.end;
} catch (const std::exception& e) {
  static DumbReceiver dumb;
  note_failure(e.what());
  return dumb;
}

void OfiLinks::raise_alarm() {
  std::lock_guard<std::mutex> lock(mutex_);
  home_.own_alarm = true;
}

bool OfiLinks::connected(int process) const {
  const OfiLink* link = link_to(process);
  return link != nullptr && link->pid() != 0;
}

bool OfiLinks::is_dead(int process) const {
  const OfiLink* link = link_to(process);
  return link != nullptr && link->state() == OfiLink::kClosed && !link->left();
}

int64_t OfiLinks::pid_of(int process) const {
  const OfiLink* link = link_to(process);
  return link == nullptr ? 0 : link->pid();
}

std::string OfiLinks::host_of(int process) const {
  const OfiLink* link = link_to(process);
  return link == nullptr || link->pid() == 0 ? "" : link->host();
}

// Nobody waits for another's turn: who finds the mutex taken leaves a note, which its holder finds
// after it has released it.
void OfiLinks::progress() {
  if (!polled_.load(std::memory_order_relaxed)) polled_.store(true, std::memory_order_seq_cst);
  drive();
}

// Spares a look at what has come, which is a system call for each slice.
void OfiLinks::push(int process) {
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock) return progress();
  if (OfiLink* link = link_to(process)) guarded(link, [&] { link->advance(); });
  lock.unlock();
  if (asked_.load(std::memory_order_seq_cst)) drive();
}

void OfiLinks::drive() {
  asked_.store(true, std::memory_order_seq_cst);
  while (asked_.load(std::memory_order_seq_cst)) {
    std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return;
    asked_.store(false, std::memory_order_seq_cst);
    const bool any = work();
    lock.unlock();
    if (any && wake_) wake_();
  }
}

bool OfiLinks::work() {
  const bool any = read_completions();
  for (const auto& link : links_) guarded(link.get(), [&] { link->advance(); });
  return any;
}

bool OfiLinks::read_completions() {
  bool any = false;
  constexpr ssize_t kCompletions = 16;
  fi_cq_msg_entry entries[kCompletions];
  for (;;) {
    const ssize_t count = fi_cq_read(fabric_.completions(), entries, kCompletions);
    if (count == -FI_EAVAIL) {
      if (!read_failed_completion()) return any;
      any = true;
      continue;
    }
    if (count <= 0) return any;
    any = true;
    for (ssize_t i = 0; i < count; ++i) {
      LinkBuffer& buffer = *LinkBuffer::of(entries[i].op_context);
      guarded(buffer.link, [&] {
        if (buffer.use == LinkBuffer::kReceive) {
          buffer.link->received(buffer, entries[i].len);
        } else {
          buffer.link->sent(buffer);
        }
      });
    }
    if (count < kCompletions) return any;  // to look again is a system call
  }
}

// A connection that ends takes what was under way with it.
bool OfiLinks::read_failed_completion() {
  fi_cq_err_entry error{};
  if (fi_cq_readerr(fabric_.completions(), &error, 0) <= 0) return false;
  if (error.op_context == nullptr) return true;
  LinkBuffer& buffer = *LinkBuffer::of(error.op_context);
  buffer.link->closed();
  if (buffer.use != LinkBuffer::kReceive) buffer.busy = false;
  return true;
}

// While others poll, the thread would be woken by what they read themselves, and take a core from
// whom they wait for. Who stops polling says so: of the two, one sees what the other has stored.
void OfiLinks::will_sleep() {
  polled_.store(false, std::memory_order_seq_cst);
  if (relies_on_polls_.load(std::memory_order_seq_cst)) ring_bell();
}

bool OfiLinks::somebody_polls() {
  relies_on_polls_.store(true, std::memory_order_seq_cst);
  if (polled_.exchange(false, std::memory_order_seq_cst)) return true;
  relies_on_polls_.store(false, std::memory_order_seq_cst);
  return false;
}

void OfiLinks::ring_bell() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t rung = write(bell_fd_, &one, sizeof one);
}

void OfiLinks::watch() {
  while (!stopping_) {
    if (somebody_polls()) fabric_.sleep(kPolledInterval_ms, bell_fd_, false);
    drive();
    bool may_sleep = false, holds_records = false, any = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      any = read_events();
      guarded(nullptr, [&] { drop_strangers(); });
      for (const auto& link : links_) holds_records |= link->has_held_records();
      may_sleep = !any && dropped_.empty() && fabric_.may_sleep();
    }
    if (any && wake_) wake_();
    // Who asked for progress while the mutex was ours has gone away again.
    if (may_sleep && !asked_.load(std::memory_order_seq_cst))
      fabric_.sleep(holds_records ? 1 : kWatchInterval_ms, bell_fd_, true);
  }
}

// Until all that was said has been heard.
void OfiLinks::say_goodbye() {
  const Clock::time_point deadline = Clock::now() + kGoodbyePatience;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& link : links_) link->say_bye();
  }
  while (!all_done() && Clock::now() < deadline) {
    progress();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

bool OfiLinks::all_done() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& link : links_) {
    if (link->state() == OfiLink::kReady && !link->is_done()) return false;
  }
  return true;
}

}  // namespace jaxring
#endif
