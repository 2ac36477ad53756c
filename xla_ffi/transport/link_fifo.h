// The ends of FIFOs that cross a link. The link's side of each is used under its mutex only; the
// schedule's side by one thread at a time; between the two lie counters.
#pragma once

#include <atomic>
#include <cstring>

#include "xla_ffi/transport/link_buffers.h"

namespace jaxring {

// Slots of their own, from which frames are sent as they are.
class LinkSender final : public Sender {
 public:
  LinkSender(LinkBuffers& buffers, FrameLayout frames, OfiLink* link, int from_rank, int to_rank,
             int channel)
      : from_rank_(from_rank),
        to_rank_(to_rank),
        channel_(channel),
        slot_count_(frames.slots()),
        slots_(buffers.make(static_cast<int>(slot_count_), frames.bytes(), link, LinkBuffer::kSlice,
                            this)) {
    for (LinkBuffer& slot : slots_) {
      FrameHeader& header = slot.header();
      header = FrameHeader{};
      header.kind = FrameKind::kSlice;
      header.from_rank = from_rank;
      header.to_rank = to_rank;
      header.channel = channel;
    }
  }

  void* try_reserve() override {
    // acquire: the library has read the slot before we write it again
    if (produced_here_ - sent_.load(std::memory_order_acquire) == slot_count_) return nullptr;
    return slots_[produced_here_ % slot_count_].payload();
  }
  void publish(int64_t bytes) override {
    slots_[produced_here_ % slot_count_].header().payload_bytes = static_cast<uint32_t>(bytes);
    // seq_cst: publishes the slot, and orders it before the look at who drives the links
    produced_.store(++produced_here_, std::memory_order_seq_cst);
  }

  // The link's side
  bool is(const FrameHeader& header) const {
    return header.from_rank == from_rank_ && header.to_rank == to_rank_ &&
           header.channel == channel_;
  }
  LinkBuffer* next_to_send() {
    if (credits_ == 0 || posted_ == produced_.load(std::memory_order_seq_cst)) return nullptr;
    return &slots_[posted_ % slot_count_];
  }
  void was_posted() {
    ++posted_;
    --credits_;
  }
  void was_sent() { sent_.fetch_add(1, std::memory_order_release); }
  bool add_credits(uint32_t count) {
    credits_ += count;
    return credits_ <= slot_count_;
  }
  bool is_idle() const { return sent_.load() == produced_.load(); }

 private:
  const int from_rank_, to_rank_, channel_;
  const uint32_t slot_count_;
  BufferBlock slots_;
  uint64_t produced_here_ = 0;
  std::atomic<uint64_t> produced_{0};
  std::atomic<uint64_t> sent_{0};
  uint64_t posted_ = 0;
  uint32_t credits_ = 0;
};

// The buffers that frames were received in are the slots.
class LinkReceiver final : public Receiver {
 public:
  LinkReceiver(FrameLayout frames, int from_rank, int to_rank, int channel)
      : from_rank_(from_rank),
        to_rank_(to_rank),
        channel_(channel),
        slot_count_(frames.slots()),
        ungranted_(slot_count_) {}

  const void* try_peek() override {
    if (consumed_here_ == arrived_.load(std::memory_order_seq_cst)) return nullptr;
    return queue_[consumed_here_ % slot_count_]->payload();
  }
  void release() override { consumed_.store(++consumed_here_, std::memory_order_seq_cst); }

  bool is(const FrameHeader& header) const {
    return header.from_rank == from_rank_ && header.to_rank == to_rank_ &&
           header.channel == channel_;
  }
  // The link's side. False: the peer sends more than it was allowed to.
  bool arrived(LinkBuffer* buffer) {
    const uint64_t now = arrived_.load(std::memory_order_relaxed);
    if (now - returned_ >= slot_count_) return false;
    queue_[now % slot_count_] = buffer;
    arrived_.store(now + 1, std::memory_order_seq_cst);
    return true;
  }
  // The oldest buffer that the schedule is done with.
  LinkBuffer* take_back() {
    if (returned_ == consumed_.load(std::memory_order_seq_cst)) return nullptr;
    ++ungranted_;
    return queue_[returned_++ % slot_count_];
  }
  FrameHeader grant() {
    FrameHeader header;
    header.kind = FrameKind::kCredit;
    header.from_rank = from_rank_;
    header.to_rank = to_rank_;
    header.channel = channel_;
    header.count = ungranted_;
    return header;
  }
  bool should_grant() const { return ungranted_ >= slot_count_ / 2; }
  void was_granted() { ungranted_ = 0; }

 private:
  const int from_rank_, to_rank_, channel_;
  const uint32_t slot_count_;
  LinkBuffer* queue_[kMostSlots] = {};
  uint64_t consumed_here_ = 0;
  std::atomic<uint64_t> arrived_{0};
  std::atomic<uint64_t> consumed_{0};
  uint64_t returned_ = 0;
  uint32_t ungranted_;  // at first: as many buffers as were made for it
};

}  // namespace jaxring
