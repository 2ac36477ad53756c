// Small messages between processes of one rank each, the case that a step's many little reductions
// make: each announcement carries its rank's operand, and once all have come the result is made
// from the rings, where they lie. No ticket, no table, no allocation. Whatever is unusual (a peer
// is late, or has announced something else) is left to arrivals.cc, for which nothing has been done
// yet but the announcement.
#include <algorithm>

#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/host/reduce_kernels.h"
#include "xla_ffi/host/wait.h"

namespace jaxring {

// Under mutex_. Another operation under way would have to be driven meanwhile.
bool Communicator::can_exchange(const Request& request) const {
  return spans_processes() && process_count_ == spec_.world_size() && table_.empty() &&
         outbox_.empty() && !broken_ && !mismatching_ && all_attached() &&
         selection_of(request).one_shot;
}

// `lock` holds mutex_, which is released for the wait.
Communicator::Exchange Communicator::try_exchange(const Request& request, const Key& key,
                                                  std::unique_lock<std::mutex>& lock) {
  if (!can_exchange(request)) return Exchange::kNotTried;
  // Tried, not waited for: it is taken before mutex_ elsewhere.
  std::unique_lock<std::mutex> polling(poll_mutex_, std::try_to_lock);
  if (!polling) return Exchange::kNotTried;
  const int rank = request.rank;
  ++open_tickets_[rank];
  announce(request, key);
  latest_launch_[rank] = std::max(latest_launch_[rank].value_or(0), key.launch);
  lock.unlock();

  const Clock::time_point arrived = Clock::now();
  for (Offer& offer : offers_) offer.payload = nullptr;
  Backoff backoff(spin_);
  bool all = peers_agree(request, key);
  while (!all && backoff.pause()) all = peers_agree(request, key);

  lock = spin_locked(mutex_);
  --open_tickets_[rank];
  if (!all || broken_ || remote_.load()->alarm_raised()) return Exchange::kAnnounced;
  patience_.was_rewarded();
  combine(request);
  note_exchanged(request, key, arrived);
  return Exchange::kDone;
}

// Whether every other rank's next record is its part in this operation. Under poll_mutex_.
bool Communicator::peers_agree(const Request& request, const Key& key) {
  const CallInfo& info = *request.info;
  ShmTransport& remote = *remote_.load(std::memory_order_relaxed);
  const uint64_t payload_bytes = request.input.count() * size_of(info.dtype);
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    Offer& offer = offers_[rank];
    if (rank == request.rank || offer.payload != nullptr) continue;
    const char* payload = remote.peek(spec_.processes[rank], &offer.header);
    if (payload == nullptr) return false;
    const RecordHeader& header = offer.header;
    const Key theirs{header.launch, header.call, header.copy, header.iteration};
    if (header.type != kArrive || header.rank != rank || !(theirs == key) ||
        header.signature != info.signature.hash ||
        header.payload_bytes != (info.is_read(rank) ? payload_bytes : 0)) {
      return false;
    }
    offer.payload = payload;
  }
  return true;
}

// From the offers to the output.
void Communicator::combine(const Request& request) {
  const CallInfo& info = *request.info;
  const int world_size = spec_.world_size();
  if (info.collective == Collective::kBarrier) return;
  if (info.collective == Collective::kAllreduce && fold_offers(request)) return;
  std::vector<Input> sources;
  std::vector<int> senders;
  for (int rank = 0; rank < world_size; ++rank) {
    senders.push_back(info.sender_to(rank));
    if (rank == request.rank) {
      sources.push_back(request.input);
      continue;
    }
    const Range held = input_range(info.collective, request.message(), world_size, rank);
    sources.emplace_back(held.offset);
    if (info.is_read(rank)) sources.back().add(offers_[rank].payload, held.count);
  }
  run_moves(Arithmetic{info.dtype, info.op, world_size}, sources, {request.output},
            moves_of(work_of(request, request.rank), world_size, local_ranks_, senders,
                     /*for_each_output=*/true));
}

// An allreduce of one array among few ranks: what combine() would do, without its lists.
bool Communicator::fold_offers(const Request& request) const {
  constexpr int kFew = 16;
  const CallInfo& info = *request.info;
  const void* own = request.input.only();
  if (spec_.world_size() > kFew || own == nullptr || request.output.only() == nullptr) return false;
  Operand operands[kFew];
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    operands[rank] = Operand{rank == request.rank ? own : offers_[rank].payload, false};
  }
  fold(info.dtype, info.op, operands, spec_.world_size(), request.output.only(), false,
       request.input.count(), spec_.world_size());
  return true;
}

// Under both mutexes.
void Communicator::note_exchanged(const Request& request, const Key& key,
                                  Clock::time_point arrived) {
  ShmTransport& remote = *remote_.load(std::memory_order_relaxed);
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (rank == request.rank) continue;
    remote.release(spec_.processes[rank], offers_[rank].header);
    latest_launch_[rank] = std::max(latest_launch_[rank].value_or(0), key.launch);
  }
  const Clock::time_point now = Clock::now();
  const Traffic traffic = (*in_place_traffic(request))[request.rank];
  stats_[{request.info->collective, Algorithm::kDirect}].count(
      traffic.bytes_sent, traffic.bytes_received,
      std::chrono::duration<double>(now - arrived).count());
  flight_.arrived(request.rank, key, request.info, arrived);
  record_end(request.rank, key, {Algorithm::kDirect, now, now, "done", nullptr});
}

}  // namespace jaxring
