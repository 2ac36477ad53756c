// Links over libfabric's FI_EP_MSG endpoints, one for each pair of processes on different hosts;
// the process with the higher number connects. Whoever polls drives them; a thread does while
// nobody polls.
#pragma once

#include <chrono>
#include <exception>
#include <mutex>
#include <thread>

#include "xla_ffi/transport/end_table.h"
#include "xla_ffi/transport/ofi_link.h"

namespace jaxring {

class OfiLinks final : public Links {
 public:
  explicit OfiLinks(LinksSpec spec);
  ~OfiLinks() override;

  std::string address() const override { return fabric_.address(); }
  void connect(const std::vector<std::string>& addresses) override;
  void bind(RecordRing own, std::vector<RecordCursor*> cursors,
            std::function<void()> wake) override;
  void disconnect() override;
  RecordRing inbox(int process) override { return home_.inboxes[process].ring; }
  RecordCursor& inbox_cursor(int process) override { return home_.inboxes[process].cursor; }
  bool crosses(int from_rank, int to_rank) const override {
    return spec_.hosts[spec_.processes[from_rank]] != spec_.hosts[spec_.processes[to_rank]];
  }
  Sender& sender(int from_rank, int to_rank, int channel) override;
  Receiver& receiver(int from_rank, int to_rank, int channel) override;
  void progress() override;
  void push(int process) override;
  void will_sleep() override;
  void raise_alarm() override;
  bool alarm_raised() const override { return home_.alarm.load(std::memory_order_seq_cst); }
  bool connected(int process) const override;
  bool is_dead(int process) const override;
  int64_t pid_of(int process) const override;
  std::string host_of(int process) const override;
  std::string failure() const override;

 private:
  using Clock = std::chrono::steady_clock;
  struct SenderEnd {
    LinkSender& end;
  };
  struct ReceiverEnd {
    LinkReceiver& end;
  };

  OfiLink* link_to(int process) const {
    return home_.by_process[process].load(std::memory_order_acquire);
  }
  OfiLink& link_of_rank(int rank) const;
  // What is thrown in f ends the link concerned and is noted for the communicator: of those who
  // drive the links, a schedule's thread and ours, none has anybody to throw to.
  template <class F>
  void guarded(OfiLink* link, F&& f) {
    try {
      f();
    } catch (const std::exception& e) {
      note_failure(e.what());
      if (link != nullptr) link->hang_up();
    }
  }
  void note_failure(const char* what);
  void drive();
  bool work();
  bool read_completions();
  bool read_failed_completion();
  bool read_events();
  void read_failed_event();
  void accept(fi_info* request);
  void drop_strangers();
  bool is_known(const OfiLink& link) const;
  void watch();
  bool somebody_polls();
  void ring_bell();
  void say_goodbye();
  bool all_done();

  const LinksSpec spec_;
  OfiFabric fabric_;
  LinkBuffers buffers_;
  OfiLink::Home home_;
  std::function<void()> wake_;
  EndTable<SenderEnd> senders_;
  EndTable<ReceiverEnd> receivers_;

  std::mutex mutex_;
  std::atomic<bool> asked_{false};  // somebody wants progress that another is making
  std::vector<std::unique_ptr<OfiLink>> links_;
  std::vector<std::unique_ptr<OfiLink>> dropped_;  // strangers; completions may still name them
  int strangers_ = 0;

  std::atomic<bool> failing_{false}, failed_{false};  // what_failed_ is being written, and is
  char what_failed_[160] = "";

  std::atomic<bool> stopping_{false};
  std::atomic<bool> polled_{false};  // by others than the thread, and they go on
  std::atomic<bool> relies_on_polls_{false};
  int bell_fd_ = -1;  // wakes the thread
  std::thread thread_;
};

}  // namespace jaxring
