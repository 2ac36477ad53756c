#if JAXRING_HAS_LIBFABRIC
#include "xla_ffi/transport/ofi_link.h"

#include <sys/random.h>

#include <algorithm>
#include <stdexcept>

namespace jaxring {
namespace {

// A frame of records: one after another, each padded so that the next header is aligned.
constexpr size_t padded(size_t bytes) { return (bytes + 7) / 8 * 8; }

bool is_introduction(FrameKind kind) {
  return kind == FrameKind::kHello || kind == FrameKind::kChallenge || kind == FrameKind::kProof;
}

}  // namespace

OfiLink::OfiLink(Home& home, int process)
    : home_(home),
      process_(process),
      connector_(process >= 0),
      record_slots_(
          home.buffers.make(kRecordSendSlots, home.frames.bytes(), this, LinkBuffer::kRecords)),
      control_slots_(
          home.buffers.make(kControlSendSlots, kControlBytes, this, LinkBuffer::kControl)) {
  if (getrandom(nonce_, sizeof nonce_, 0) != sizeof nonce_) {
    throw std::runtime_error("jaxring could not draw a random nonce");
  }
  receives_.push_back(home.buffers.make(kRecordCredits + kControlReceives, home.frames.bytes(),
                                        this, LinkBuffer::kReceive));
}

OfiLink::~OfiLink() { hang_up(); }

void OfiLink::hang_up() {
  closed();
  if (endpoint_ != nullptr) fi_close(&endpoint_->fid);
  endpoint_ = nullptr;
}

void OfiLink::opened(fid_ep* endpoint) {
  endpoint_ = endpoint;
  for (LinkBuffer& buffer : receives_.front()) post(buffer);
}

void OfiLink::connected() {
  if (state() != kConnecting) return;
  state_.store(kIntroducing, std::memory_order_release);
  if (connector_ && !send_introduction(FrameKind::kHello, nullptr)) closed();
}

void OfiLink::closed() {
  if (state() == kClosed) return;
  state_.store(kClosed, std::memory_order_release);
}

void OfiLink::post(LinkBuffer& buffer) {
  if (state() == kClosed) return;
  if (!unposted_.empty() ||
      fi_recv(endpoint_, buffer.data, buffer.bytes, buffer.descriptor, 0, &buffer.context) != 0) {
    unposted_.push_back(&buffer);  // the queue is full; advance() tries again
  }
}

void OfiLink::received(LinkBuffer& buffer, size_t bytes) {
  if (state() == kClosed) return;
  // What it says about its size must be what has come.
  const FrameHeader& header = buffer.header();
  const bool whole = bytes >= sizeof(FrameHeader) &&
                     bytes == sizeof(FrameHeader) + header.payload_bytes &&
                     bytes <= static_cast<size_t>(home_.frames.bytes());
  if (!whole || !dispatch(buffer)) closed();
}

// False: the peer has broken the rules.
bool OfiLink::dispatch(LinkBuffer& buffer) {
  const FrameHeader header = buffer.header();
  if (is_introduction(header.kind) != (state() != kReady)) return false;
  switch (header.kind) {
    case FrameKind::kHello:
    case FrameKind::kChallenge:
    case FrameKind::kProof:
      if (!introduce(header.kind, buffer)) return false;
      break;
    case FrameKind::kSlice: {
      LinkReceiver* receiver = find_receiver(header);
      return receiver != nullptr && receiver->arrived(&buffer);
    }
    case FrameKind::kRecords:
      held_.push_back(Held{&buffer, 0});
      store_held();
      return true;
    case FrameKind::kCredit:
      if (!grant_arrived(header)) return false;
      break;
    case FrameKind::kAlarm:
      home_.alarm.store(true, std::memory_order_seq_cst);
      break;
    case FrameKind::kBye:
      left_.store(true, std::memory_order_release);
      owes_ack_ = true;
      break;
    case FrameKind::kByeAck:
      bye_acknowledged_ = true;
      break;
    default:
      return false;
  }
  post(buffer);
  return true;
}

bool OfiLink::grant_arrived(const FrameHeader& header) {
  if (header.from_rank < 0) {
    record_credits_ += header.count;
    return record_credits_ <= kRecordCredits;
  }
  const std::vector<int>& processes = home_.spec.processes;
  const int ranks = static_cast<int>(processes.size());
  const bool ours = header.from_rank < ranks && header.to_rank >= 0 && header.to_rank < ranks &&
                    header.channel >= 0 && header.channel < kMaxChannels &&
                    processes[header.from_rank] == home_.spec.self_process &&
                    processes[header.to_rank] == process_;
  // The peer may begin before our schedule does.
  return ours && add_sender(header.from_rank, header.to_rank, header.channel)
                     .add_credits(std::min(header.count, home_.frames.slots() + 1));
}

// In the order in which they came, as far as the inbox has room. What does not parse is dropped:
// only one who knows the secret can have sent it.
void OfiLink::store_held() {
  while (!held_.empty() && store(held_.front())) {
    post(*held_.front().buffer);
    held_.pop_front();
    ++ungranted_records_;
  }
}

bool OfiLink::store(Held& held) {
  OfiLink::Home::Inbox& inbox = home_.inboxes[process_];
  const size_t bytes = held.buffer->header().payload_bytes;
  auto oldest = [&] { return inbox.cursor.position.load(std::memory_order_acquire); };
  while (held.at + sizeof(RecordHeader) <= bytes) {
    RecordHeader record;
    std::memcpy(&record, held.buffer->payload() + held.at, sizeof record);
    const size_t end = held.at + sizeof record + record.payload_bytes;
    if (end > bytes || record.type == RecordWriter::kSkip) return true;
    const char* payload = held.buffer->payload() + held.at + sizeof record;
    if (!inbox.writer.try_write(inbox.ring, record, payload, oldest)) return false;
    held.at = padded(end);
  }
  return true;
}

LinkSender* OfiLink::find_sender(const FrameHeader& header) {
  for (const auto& sender : senders_) {
    if (sender->is(header)) return sender.get();
  }
  return nullptr;
}

LinkReceiver* OfiLink::find_receiver(const FrameHeader& header) {
  for (const auto& receiver : receivers_) {
    if (receiver->is(header)) return receiver.get();
  }
  return nullptr;
}

LinkSender& OfiLink::add_sender(int from_rank, int to_rank, int channel) {
  FrameHeader header;
  header.from_rank = from_rank, header.to_rank = to_rank, header.channel = channel;
  if (LinkSender* known = find_sender(header)) return *known;
  senders_.push_back(
      std::make_unique<LinkSender>(home_.buffers, home_.frames, this, from_rank, to_rank, channel));
  return *senders_.back();
}

LinkReceiver& OfiLink::add_receiver(int from_rank, int to_rank, int channel) {
  receivers_.push_back(std::make_unique<LinkReceiver>(home_.frames, from_rank, to_rank, channel));
  receives_.push_back(home_.buffers.make(static_cast<int>(home_.frames.slots()),
                                         home_.frames.bytes(), this, LinkBuffer::kReceive));
  for (LinkBuffer& buffer : receives_.back()) post(buffer);
  return *receivers_.back();
}

void OfiLink::advance() {
  while (!unposted_.empty() && state() != kClosed) {
    LinkBuffer& buffer = *unposted_.front();
    if (fi_recv(endpoint_, buffer.data, buffer.bytes, buffer.descriptor, 0, &buffer.context) != 0) {
      break;
    }
    unposted_.pop_front();
  }
  store_held();
  if (state() != kReady) return;
  send_grants();
  send_slices();
  send_records();
  send_goodbyes();
}

bool OfiLink::send(LinkBuffer& buffer) {
  const size_t bytes = sizeof(FrameHeader) + buffer.header().payload_bytes;
  if (fi_send(endpoint_, buffer.data, bytes, buffer.descriptor, 0, &buffer.context) != 0) {
    return false;  // the queue is full, or the connection has ended, which an event will tell
  }
  buffer.busy = true;
  return true;
}

void OfiLink::sent(LinkBuffer& buffer) {
  buffer.busy = false;
  if (buffer.use == LinkBuffer::kRecords) buffer.header() = FrameHeader{};
  if (buffer.use == LinkBuffer::kSlice) static_cast<LinkSender*>(buffer.owner)->was_sent();
}

bool OfiLink::send_control(const FrameHeader& header) {
  LinkBuffer* buffer = control_slots_.find_idle();
  if (buffer == nullptr) return false;
  buffer->header() = header;
  return send(*buffer);
}

void OfiLink::send_slices() {
  for (const auto& sender : senders_) {
    while (LinkBuffer* slot = sender->next_to_send()) {
      if (!send(*slot)) return;
      sender->was_posted();
    }
  }
}

void OfiLink::send_records() {
  if (home_.own_alarm && !alarm_sent_) {
    FrameHeader header;
    header.kind = FrameKind::kAlarm;
    alarm_sent_ = send_control(header);
  }
  while (record_credits_ > 0) {
    if (packed_ == nullptr) packed_ = record_slots_.find_idle();
    if (packed_ == nullptr) return;
    FrameHeader& header = packed_->header();
    if (header.payload_bytes == 0) {
      header.kind = FrameKind::kRecords;
      header.payload_bytes = static_cast<uint32_t>(pack_records(packed_->payload()));
    }
    if (header.payload_bytes == 0 || !send(*packed_)) return;
    packed_ = nullptr;
    --record_credits_;
  }
}

// As many as fit; they are free to be overwritten then.
size_t OfiLink::pack_records(char* payload) {
  RecordCursor& cursor = *home_.cursors[process_];
  const auto room = static_cast<size_t>(home_.frames.payload_bytes());
  size_t at = 0;
  RecordHeader header;
  while (const char* record = reader_.peek(home_.own_records, cursor, &header)) {
    const size_t bytes = sizeof header + header.payload_bytes;
    if (at + bytes > room) break;
    std::memcpy(payload + at, &header, sizeof header);
    std::memcpy(payload + at + sizeof header, record, header.payload_bytes);
    reader_.release(home_.own_records, cursor, header);
    at = std::min(padded(at + bytes), room);
  }
  return at;
}

void OfiLink::send_grants() {
  for (const auto& receiver : receivers_) {
    while (LinkBuffer* buffer = receiver->take_back()) post(*buffer);
    if (receiver->should_grant() && send_control(receiver->grant())) receiver->was_granted();
  }
  if (ungranted_records_ < kRecordCredits / 2) return;
  FrameHeader header;
  header.kind = FrameKind::kCredit;
  header.count = ungranted_records_;
  if (send_control(header)) ungranted_records_ = 0;
}

void OfiLink::send_goodbyes() {
  FrameHeader header;
  if (owes_ack_) {
    header.kind = FrameKind::kByeAck;
    if (send_control(header)) owes_ack_ = false;
  }
  if (!wants_bye_ || bye_sent_) return;
  RecordHeader unsent;
  if (packed_ != nullptr && packed_->header().payload_bytes > 0) return;
  if (reader_.peek(home_.own_records, *home_.cursors[process_], &unsent) != nullptr) return;
  for (const auto& sender : senders_) {
    if (!sender->is_idle() && !home_.own_alarm) return;  // after a failure nobody wants it any more
  }
  header.kind = FrameKind::kBye;
  bye_sent_ = send_control(header);
}

}  // namespace jaxring
#endif
