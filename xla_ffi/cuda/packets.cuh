// One-shot push: every rank writes what a peer needs into that peer's arena, in packets of 4 bytes
// and a flag. One trip over the link and no barrier between ranks: a packet says itself that it is
// there. Half of what travels is flags, so it is for small messages. Model: NCCL's LL protocol.
//
// Flags are the low half of the epoch, which the block counts. There are two sets of packets, for
// even and odd epochs: a rank overwrites the packets of epoch e - 2 only after it has received one
// of epoch e - 1 from each peer, whose kernel of epoch e - 2 was then over. So each rank sends each
// peer at least one packet per epoch.
#pragma once

#include <cstdint>

#include "xla_ffi/cuda/channel.cuh"
#include "xla_ffi/cuda/fold.cuh"

namespace jaxring::cuda {

// Flags come round after 2^32 epochs. So that no packet of then is left, all are rewritten,
// whatever the message's size, in one of this many pairs of epochs.
constexpr uint64_t kPacketRefreshEpochs = uint64_t{1} << 20;

// Peers that a thread polls at once; what they sent stays in registers.
constexpr int kPolledPeers = 8;

template <class Channel>
class PacketExchange {
  using Block = typename Channel::Block;

 public:
  JR_DEVICE PacketExchange(Channel& channel, uint64_t epoch)
      : channel_(channel),
        block_(channel.block),
        flag_(static_cast<uint32_t>(epoch)),
        parity_(mutated(Mutation::kPacketParity) ? 0 : epoch & 1),
        refreshes_(!mutated(Mutation::kPacketRefresh) && (epoch >> 1) % kPacketRefreshEpochs == 0),
        packs_(channel.part().count > 0 ? channel.part().count : 1) {}

  // This thread's share; false if a wait failed.
  JR_DEVICE bool run() {
    send();
    for (int64_t pack = block_.thread(); pack < packs_; pack += block_.thread_count()) {
      if (!receive(pack)) return false;
    }
    return true;
  }

 private:
  // Packs that travel where there is a payload, and where there is none.
  JR_DEVICE int64_t sent_packs(bool payload) const {
    if (refreshes_) return channel_.call.plan.arena.shape.packet_packs;
    return payload ? packs_ : mutated(Mutation::kPacketEmpty) ? 0 : 1;
  }

  JR_DEVICE void send() {
    const int world_size = channel_.world_size();
    for (int hop = 1; hop < world_size; ++hop) {  // not all to the same peer first
      const int to = (channel_.rank() + hop) % world_size;
      const bool payload = channel_.sends_to(to);
      Packets* packets = channel_.arena(to).packets(block_.index, parity_, channel_.rank());
      for (int64_t pack = block_.thread(); pack < sent_packs(payload);
           pack += block_.thread_count()) {
        Pack data{};
        if (payload && pack < packs_) data = loaded(channel_.input(to, 0), pack);
        store(packets + 2 * pack, data);
      }
    }
  }

  JR_DEVICE void store(Packets* packets, const Pack& data) {
#if defined(JR_MUTATIONS)
    if (mutated(Mutation::kPacketAtomic)) {  // flag first
      block_.store_packets(packets, packets_of(0, 0, flag_));
      block_.store_packets(packets + 1, packets_of(0, 0, flag_));
      block_.pause();
    }
#endif
    block_.store_packets(packets, packets_of(data.words[0], data.words[1], flag_));
    block_.store_packets(packets + 1, packets_of(data.words[2], data.words[3], flag_));
  }

  // Pack `pack` of this block's part, from all peers, into the output.
  JR_DEVICE bool receive(int64_t pack) {
    WideGroup sum;
    bool has_sum = false;
    for (int base = 0; base < channel_.world_size(); base += kPolledPeers) {
      Pack received[kPolledPeers];
      if (!poll(base, pack, received)) return false;
      int count = 0;  // of those to fold, moved together
      JR_NO_UNROLL
      for (int k = 0; k < kPolledPeers && base + k < channel_.world_size(); ++k) {
        const int from = base + k;
        if (!channel_.receives_from(from)) continue;
        const Pack data =
            from == channel_.rank() ? loaded(channel_.input(from, 0), pack) : received[k];
        if (channel_.reduces()) {
          received[count++] = data;
        } else {
          store_output(from, pack, data);
        }
      }
      if (count == 0) continue;
      Channel::Types::fold_packs(channel_.call.plan, received, count, has_sum, &sum);
      has_sum = true;
    }
    if (has_sum) {
      store_output(0, pack, Channel::Types::finished_pack(channel_.call.plan, &sum));
    } else if (!channel_.receives_anything()) {
      store_output(0, pack, Pack{});
    }
    return true;
  }

  // Waits for a pack of each of kPolledPeers peers, all at once: one after the other would cost a
  // trip to memory each.
  JR_DEVICE bool poll(int base, int64_t pack, Pack* received) {
    Deadline<Block> deadline(block_, channel_.call);
    uint32_t awaited = 0;
    JR_NO_UNROLL
    for (int k = 0; k < kPolledPeers && base + k < channel_.world_size(); ++k) {
      const int from = base + k;
      const bool comes = from != channel_.rank() && (pack == 0 || channel_.receives_from(from));
      awaited |= static_cast<uint32_t>(comes) << k;
    }
    const Arena own = channel_.arena(channel_.rank());
    const Packets* first = own.packets(block_.index, parity_, base) + 2 * pack;
    while (awaited != 0) {
      JR_UNROLL
      for (int k = 0; k < kPolledPeers; ++k) {
        if ((awaited >> k & 1) == 0) continue;
        const Packets* packets = first + k * own.packets_per_peer();
        const Packets low = block_.load_packets(packets);
        const Packets high = block_.load_packets(packets + 1);
        received[k] = payload_of(low, high);
        const bool came =
            (carry(low, flag_) && carry(high, flag_)) || mutated(Mutation::kPacketFlag);
        awaited &= ~(static_cast<uint32_t>(came) << k);
      }
      if (awaited != 0 && deadline.passed(base + lowest_bit(awaited))) return false;
    }
    return true;
  }

  JR_DEVICE static int lowest_bit(uint32_t bits) {
    int index = 0;
    while ((bits >> index & 1) == 0) ++index;
    return index;
  }

  JR_DEVICE Range bytes_of(int64_t pack) const {
    return channel_.bytes_of(Range{channel_.part().offset + pack, 1});
  }

  // A pack of this block's part, padded with zeros where the message ends.
  JR_DEVICE Pack loaded(const char* piece, int64_t pack) {
    const Range range = bytes_of(pack);
    const char* from = piece + range.offset;
    if (range.count == kPackBytes && is_aligned(from, kPackBytes)) return block_.load16(from);
    char bytes[kPackBytes] = {};
    JR_NO_UNROLL
    for (int i = 0; i < range.count; ++i) bytes[i] = from[i];
    Pack result;
    memcpy(&result, bytes, sizeof(result));
    return result;
  }

  JR_DEVICE void store_output(int from, int64_t pack, const Pack& data) {
    const Range range = bytes_of(pack);
    char* to = channel_.output(from, range.offset);
    if (range.count == kPackBytes && is_aligned(to, kPackBytes)) return block_.store16(to, data);
    char bytes[kPackBytes];
    memcpy(bytes, &data, sizeof(data));
    JR_NO_UNROLL
    for (int i = 0; i < range.count; ++i) to[i] = bytes[i];
  }

  Channel& channel_;
  Block& block_;
  const uint32_t flag_;
  const uint64_t parity_;
  const bool refreshes_;
  const int64_t packs_;  // of this block's part; where it is empty, one that carries nothing
};

template <class Channel>
JR_DEVICE JR_NOINLINE bool run_packets(Channel& channel) {
  const uint64_t epoch = channel.state()->packets + 1;
  const bool received = PacketExchange<Channel>(channel, epoch).run();
  if (mutated(Mutation::kEpochBarrier)) {
    if (channel.block.thread() == 0) channel.state()->packets = epoch;
    return !channel.block.any(!received);
  }
  // Once all threads have read the epoch and are through.
  if (channel.block.any(!received)) return false;
  if (channel.block.thread() == 0) channel.state()->packets = epoch;
  return true;
}

}  // namespace jaxring::cuda
