// Small messages between devices of one process: the ranks take their seats, the last one to come
// does the work of all, from buffer to buffer. No ticket, no table, no allocation, and few cache
// lines that travel between cores. Whatever is unusual (a rank is late, or comes for another
// operation) dissolves the meeting: its ranks go on as arrivals.cc has it.
#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/host/wait.h"

namespace jaxring {
namespace {

// What each rank brings, and all together, up to which the last to come does it all: the others'
// threads would take longer to wake. An operation of 64 KiB takes 17 us on 4 devices and 37 on 8,
// where it took 40 and 93 by all threads.
constexpr int64_t kMostBytes = 64 << 10;
constexpr int64_t kMostBytesOfAll = 512 << 10;

}  // namespace

// Under mutex_.
bool Communicator::can_meet(const Request& request) const {
  if (spans_processes() || !table_.empty() || broken_) return false;
  const int64_t bytes = request.message().count * size_of(request.info->dtype);
  return bytes <= kMostBytes && bytes * spec_.world_size() <= kMostBytesOfAll &&
         selection_of(request).algorithm == Algorithm::kDirect;
}

// `lock` holds mutex_, which is released for the wait. True: done, or there is a ticket to wait
// for.
bool Communicator::try_meeting(const Request& request, const Key& key,
                               std::unique_lock<std::mutex>& lock,
                               std::shared_ptr<Ticket>* ticket) {
  if (!can_meet(request)) {
    dissolve_meeting();
    return false;
  }
  const uint64_t signature = request.info->signature.hash;
  const bool another = !(meeting_key_ == key) || meeting_signature_ != signature;
  if (seated_ > 0 && (another || seats_[request.rank] != nullptr)) {
    dissolve_meeting();
    return false;
  }
  Seat seat(request);
  seats_[request.rank] = &seat;
  meeting_key_ = key;
  meeting_signature_ = signature;
  ++open_tickets_[request.rank];
  // Another thread of this device may come with another call of the same launch: see check_arrival.
  latest_launch_[request.rank] = std::max(latest_launch_[request.rank].value_or(0), key.launch);
  if (++seated_ == spec_.world_size()) {
    hold_meeting(request.rank);
    return true;
  }
  lock.unlock();
  if (!wait_in_seat(seat)) {
    lock = spin_locked(mutex_);
    if (seats_[request.rank] == &seat) dissolve_meeting();
  }
  *ticket = std::move(seat.ticket);  // null if it is done
  return true;
}

// False: nothing has happened for as long as a thread may be lent.
bool Communicator::wait_in_seat(Seat& seat) {
  auto over = [&] { return seat.state.load(std::memory_order_acquire) == Ticket::kDone; };
  Backoff backoff(spin_);
  while (!over()) {
    if (backoff.pause()) continue;
    uint32_t expected = Ticket::kWaiting;
    if (seat.state.compare_exchange_strong(expected, Ticket::kSleeping,
                                           std::memory_order_acq_rel)) {
      futex_wait(&seat.state, Ticket::kSleeping, patience_.time(), true);
      if (over()) patience_.was_rewarded();
      return over();
    }
  }
  return true;
}

// The last rank has come. Under mutex_.
void Communicator::hold_meeting(int last) {
  const Request& request = seats_[last]->request;
  const CallInfo& info = *request.info;
  std::vector<Input> sources;
  std::vector<Output> outputs;
  std::vector<int> senders;
  for (const Seat* seat : seats_) {
    sources.push_back(seat->request.input);
    outputs.push_back(seat->request.output);
    if (info.collective == Collective::kPermute) {
      senders.push_back(info.sender_to(seat->request.rank));
    }
  }
  run_moves(Arithmetic{info.dtype, info.op, spec_.world_size()}, sources, outputs,
            moves_of(work_of(request, local_ranks_.front()), spec_.world_size(), local_ranks_,
                     senders, /*for_each_output=*/false));
  const Clock::time_point ready = seats_[last]->arrived, now = Clock::now();
  const auto traffic = in_place_traffic(request);
  Counters& counters = stats_[{info.collective, Algorithm::kDirect}];
  seated_ = 0;
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    const Seat& seat = *seats_[rank];
    counters.count((*traffic)[rank].bytes_sent, (*traffic)[rank].bytes_received,
                   std::chrono::duration<double>(ready - seat.arrived).count());
    flight_.arrived(rank, meeting_key_, seat.request.info, seat.arrived);
    record_end(rank, meeting_key_, {Algorithm::kDirect, ready, now, "done", nullptr});
    leave_seat(rank);
  }
}

// The seat may be gone once its state is kDone: only its address is used then. Under mutex_.
void Communicator::leave_seat(int rank) {
  std::atomic<uint32_t>& state = seats_[rank]->state;
  seats_[rank] = nullptr;
  --open_tickets_[rank];
  // release: who has sat there sees outputs and ticket
  if (state.exchange(Ticket::kDone, std::memory_order_acq_rel) == Ticket::kSleeping) {
    futex_wake_all(&state, true);
  }
}

// Those who have come get tickets and go the long way. Under mutex_.
void Communicator::dissolve_meeting() {
  if (seated_ == 0) return;
  seated_ = 0;
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (seats_[rank] == nullptr) continue;
    const auto ticket = std::make_shared<Ticket>(seats_[rank]->request, seats_[rank]->arrived);
    seats_[rank]->ticket = ticket;
    leave_seat(rank);
    arrive(ticket, meeting_key_, false);
  }
}

}  // namespace jaxring
