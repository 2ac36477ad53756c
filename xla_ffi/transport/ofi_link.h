// One connection: its introduction, its FIFOs, its share of the records. All of it is used under
// the mutex of its OfiLinks, but for the schedule's side of the FIFOs.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "xla_ffi/transport/link_fifo.h"
#include "xla_ffi/transport/links.h"
#include "xla_ffi/transport/ofi_fabric.h"

namespace jaxring {

class OfiLink {
 public:
  enum State : uint8_t { kConnecting, kIntroducing, kReady, kClosed };

  // What a link needs of the communicator's links as a whole.
  struct Home {
    const LinksSpec& spec;
    const FrameLayout frames;
    LinkBuffers& buffers;
    RecordRing own_records;
    std::vector<RecordCursor*> cursors;  // of the remote processes in our ring
    struct Inbox {
      RecordRing ring;
      RecordCursor cursor;
      RecordWriter writer;
      std::unique_ptr<char, void (*)(void*)> memory{nullptr, nullptr};
    };
    std::vector<Inbox> inboxes;  // by process
    std::vector<std::atomic<OfiLink*>> by_process;
    std::atomic<bool> alarm{false};  // raised by a remote process
    bool own_alarm = false;

    explicit Home(const LinksSpec& s, LinkBuffers& b)
        : spec(s),
          frames{s.slice_bytes},
          buffers(b),
          inboxes(s.process_count()),
          by_process(s.process_count()) {}
  };

  OfiLink(Home& home, int process);  // -1: not known yet, it has asked to connect
  ~OfiLink();
  OfiLink(const OfiLink&) = delete;

  // What the links tell it of the library's events.
  void opened(fid_ep* endpoint);  // posts the buffers to receive in
  void connected();
  void received(LinkBuffer& buffer, size_t bytes);
  void sent(LinkBuffer& buffer);
  void closed();  // by the peer, or because it broke a rule

  void hang_up();  // ends the connection; completions of it may still be read

  // Sends what there is to send, takes back what has been read.
  void advance();

  LinkSender& add_sender(int from_rank, int to_rank, int channel);
  LinkReceiver& add_receiver(int from_rank, int to_rank, int channel);

  void say_bye() { wants_bye_ = true; }
  // Whether everything has been sent and received.
  bool is_done() const { return state() == kClosed || bye_acknowledged_; }

  State state() const { return state_.load(std::memory_order_acquire); }
  bool is_stranger() const { return process_ < 0; }
  int process() const { return process_; }
  bool left() const { return left_.load(std::memory_order_acquire); }
  bool has_held_records() const { return !held_.empty(); }
  int64_t pid() const { return pid_.load(std::memory_order_acquire); }
  const std::string& host() const { return host_; }
  std::chrono::steady_clock::time_point begun() const { return begun_; }
  fid_ep* endpoint() const { return endpoint_; }

 private:
  struct Held {  // records that found no room in the inbox yet
    LinkBuffer* buffer;
    size_t at;
  };

  bool introduce(FrameKind kind, LinkBuffer& buffer);
  void fill(Introduction* introduction, const char* role) const;
  bool is_proven(const Introduction& introduction, const char* role) const;
  Digest proof(const char* role, int from, int to) const;
  bool take_over(const Introduction& introduction);

  bool dispatch(LinkBuffer& buffer);
  bool grant_arrived(const FrameHeader& header);
  void store_held();
  bool store(Held& held);
  LinkSender* find_sender(const FrameHeader& header);
  LinkReceiver* find_receiver(const FrameHeader& header);

  void send_slices();
  void send_records();
  size_t pack_records(char* payload);
  void send_grants();
  void send_goodbyes();
  bool send(LinkBuffer& buffer);
  bool send_control(const FrameHeader& header);
  bool send_introduction(FrameKind kind, const char* role);
  void post(LinkBuffer& buffer);

  Home& home_;
  int process_;
  const bool connector_;
  const std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
  fid_ep* endpoint_ = nullptr;
  std::atomic<State> state_{kConnecting};
  std::atomic<bool> left_{false};
  uint8_t nonce_[32];
  uint8_t peer_nonce_[32] = {};
  std::string host_;
  std::atomic<int64_t> pid_{0};  // set last of all that a peer says of itself

  std::vector<BufferBlock> receives_;
  BufferBlock record_slots_;
  BufferBlock control_slots_;
  std::vector<std::unique_ptr<LinkSender>> senders_;
  std::vector<std::unique_ptr<LinkReceiver>> receivers_;
  std::deque<LinkBuffer*> unposted_;
  std::deque<Held> held_;
  RecordReader reader_;
  LinkBuffer* packed_ = nullptr;  // the next frame of records, until the library has taken it
  uint32_t record_credits_ = kRecordCredits;
  uint32_t ungranted_records_ = 0;
  bool alarm_sent_ = false;
  bool wants_bye_ = false, bye_sent_ = false, bye_acknowledged_ = false, owes_ack_ = false;
};

}  // namespace jaxring
