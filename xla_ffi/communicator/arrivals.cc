// Announcing and matching. Everything here runs under the communicator's mutex.
#include <cstring>

#include "xla_ffi/algorithms/counting.h"
#include "xla_ffi/algorithms/select.h"
#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/host/in_place.h"

namespace jaxring {
namespace {

std::string packed(const Input& input, DType dtype) {
  const int64_t element_bytes = size_of(dtype);
  std::string bytes(input.count() * element_bytes, '\0');
  input.for_each_piece(input.range(), element_bytes, [&](const void* data, Range piece) {
    std::memcpy(&bytes[piece.offset * element_bytes], data, piece.count * element_bytes);
  });
  return bytes;
}

// What all ranks together bring, up to which each output is made by itself; beyond, what all get
// alike is made once (docs/performance.md).
constexpr int64_t kForEachOutputBytes = 1 << 20;

// What all ranks together bring, up to which the last to arrive does the work of all: waking a
// second thread for it would take longer.
constexpr int64_t kAtOnceBytes = 64 << 10;

}  // namespace

Selection Communicator::selection_of(const Request& request) const {
  const CallInfo& info = *request.info;
  const int64_t element_bytes = size_of(info.dtype);
  const int64_t wire_bytes = accumulator_size_of(info.dtype);
  return select(Criteria{info.collective, info.algorithm, info.deterministic, process_count_,
                         request.input.count(), element_bytes, wire_bytes, info.chunk_bytes,
                         hosts_.get()});
}

Work Communicator::work_of(const Request& request, int rank) const {
  const CallInfo& info = *request.info;
  Work work{info.collective, request.message(), info.root};
  if (info.collective == Collective::kPermute) {
    work.destination = info.destinations[rank];
    work.source = info.sender_to(rank);
  }
  return work;
}

Key Communicator::key_of(const Request& request) {
  return Key{launches_.ordinal_of(request.run_id), request.call, request.copy, request.iteration};
}

void Communicator::arrive(const std::shared_ptr<Ticket>& ticket, const Key& key, bool announced) {
  const Request& request = ticket->request;
  const Operation operation = find_or_add(key);
  if (operation->ticket_count++ == 0) operation->deadline = ticket->arrived + settings().timeout();
  operation->tickets[request.rank] = ticket;
  flight_.arrived(request.rank, key, request.info, ticket->arrived);
  ++open_tickets_[request.rank];
  if (!announced && spans_processes()) announce(request, key);
  note_launch(request.rank, key.launch);
  mark_announced(operation, request.rank, request.info->signature.hash);
}

std::optional<Error> Communicator::check_arrival(const Request& request, const Key& key) const {
  if (broken_) return broken_;
  const int rank = request.rank;
  auto failed = failed_launches_.find(key.launch);
  if (failed != failed_launches_.end()) return failed->second;
  auto found = table_.find(key);
  const bool twice = found != table_.end() && found->second->tickets[rank];
  // A device runs its launches one after another, so an open ticket of an older one means two
  // threads.
  const bool overlapping =
      latest_launch_[rank] && *latest_launch_[rank] != key.launch && open_tickets_[rank] > 0;
  if (!twice && !overlapping) return std::nullopt;
  Error error;
  error.kind = ErrorKind::kUsageError;
  error.call = request.info->label();
  error.rank = rank;
  error.message = error.call + ": rank " + std::to_string(rank) + " of communicator " + spec_.key +
                  " is still inside another launch; order the launches of one communicator, e.g. "
                  "launch them from one thread or give each thread its own communicator";
  return error;
}

Communicator::Operation Communicator::find_or_add(const Key& key) {
  Operation& operation = table_[key];
  if (!operation) operation = std::make_shared<PendingOperation>(key, spec_.world_size());
  return operation;
}

// A small operand travels along.
void Communicator::announce(const Request& request, const Key& key) {
  const CallInfo& info = *request.info;
  RecordHeader header = header_of(key);
  header.type = kArrive;
  header.rank = static_cast<uint16_t>(request.rank);
  header.signature = info.signature.hash;
  const bool carries = selection_of(request).one_shot && info.is_read(request.rank);
  if (!carries || request.input.count() == 0) return post(header, nullptr);
  const int64_t element_bytes = size_of(info.dtype);
  header.payload_bytes = static_cast<uint32_t>(request.input.count() * element_bytes);
  if (const void* whole = request.input.only())
    return post(header, static_cast<const char*>(whole));
  post(header, packed(request.input, info.dtype).data());
}

// A rank's launches run in order, so one that has come to a later launch will never announce what
// others wait for in an earlier one: already now, or, if the rank was the faster one, when they get
// there (somebody_is_past).
void Communicator::note_launch(int rank, uint32_t launch) {
  if (latest_launch_[rank] && *latest_launch_[rank] >= launch) return;
  latest_launch_[rank] = launch;
  for (const auto& [key, operation] : table_) {
    if (key.launch < launch && !operation->announced[rank]) return start_mismatch(key);
  }
}

bool Communicator::somebody_is_past(const PendingOperation& operation) const {
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (!operation.announced[rank] && latest_launch_[rank].value_or(0) > operation.key.launch) {
      return true;
    }
  }
  return false;
}

void Communicator::mark_announced(const Operation& operation, int rank, uint64_t signature) {
  if (operation->announced[rank]) return;
  operation->announce(rank, signature);
  if (operation->disputed || somebody_is_past(*operation)) return start_mismatch(operation->key);
  start_if_ready(operation);
}

void Communicator::start_if_ready(const Operation& operation) {
  if (operation->execution || operation->announced_count < spec_.world_size()) return;
  operation->ready = Clock::now();
  const Request& request = operation->first_ticket()->request;
  const Selection selection = selection_of(request);
  const bool needs_order = spans_processes() && spec_.world_size() > 1 && !selection.one_shot;
  if (needs_order && is_leader()) {
    RecordHeader header = header_of(operation->key);
    header.type = kOrder;
    post(header, nullptr);
    operation->ordered = true;
    scheduled_.push_back(operation);
  }
  // Elsewhere the leader's order puts it there; it may have come already or be on its way.
  if (!needs_order || operation->ordered) start(operation);
}

void Communicator::start(const Operation& operation) {
  const Request& request = operation->first_ticket()->request;
  const Selection selection = selection_of(request);
  operation->algorithm = selection.algorithm;
  const bool in_place =
      selection.algorithm == Algorithm::kDirect && (selection.one_shot || !spans_processes());
  if (in_place) {
    if (!payloads_fit(*operation)) return start_mismatch(operation->key);
    operation->execution = start_in_place(operation);
    if (!operation->execution) return;  // done
    immediate_.push_back(operation);
  } else {
    operation->execution = make_scheduled(*operation, selection.chunk_elements);
    if (!operation->ordered) scheduled_.push_back(operation);
  }
  started_.fetch_add(1, std::memory_order_release);
  call_for_help(*operation);
}

// Those who have lent their threads and fallen asleep over it, and the progress thread if anything
// has been handed over to it (else a wake-up would cost more than it brings).
void Communicator::call_for_help(const PendingOperation& operation) {
  if (handed_over_ > 0) news_.notify_all();
  for (int rank : local_ranks_) {
    const auto& ticket = operation.tickets[rank];
    if (!ticket || ticket->state.load(std::memory_order_acquire) != Ticket::kSleeping) continue;
    ticket->awake();
    futex_wake_all(&ticket->state, true);
  }
}

// Equal signatures mean equal sizes; but a payload comes from another process, so it is checked.
bool Communicator::payloads_fit(const PendingOperation& operation) const {
  const Request& request = operation.first_ticket()->request;
  const size_t bytes = request.input.count() * size_of(request.info->dtype);
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    const size_t expected = request.info->is_read(rank) ? bytes : 0;
    if (!is_local(rank) && operation.payloads[rank].size() != expected) return false;
  }
  return true;
}

namespace {

// Whether XLA has given an operand and its result one buffer, as it may in an allreduce. Then no
// result may be made from the operands once another one has been written.
bool in_one_buffer(const Input& input, const Output& output, int64_t element_bytes) {
  if (input.count() != output.count()) return false;
  bool any = false;
  output.for_each_piece(output.range(), element_bytes, [&](void* to, Range part) {
    const Range range{input.range().offset + part.offset, part.count};
    input.for_each_piece(range, element_bytes, [&](const void* from, Range) { any |= from == to; });
  });
  return any;
}

}  // namespace

// Does a small operation at once, and returns null.
std::unique_ptr<Execution> Communicator::start_in_place(const Operation& operation) {
  const Request& request = operation->first_ticket()->request;
  const CallInfo& info = *request.info;
  const int world_size = spec_.world_size();
  std::vector<Input> sources;
  std::vector<Output> outputs;
  std::vector<int> senders;
  bool overwrites = false;
  for (int rank = 0; rank < world_size; ++rank) {
    senders.push_back(info.sender_to(rank));
    if (const auto& ticket = operation->tickets[rank]) {
      overwrites |=
          in_one_buffer(ticket->request.input, ticket->request.output, size_of(info.dtype));
      sources.push_back(ticket->request.input);
      outputs.push_back(ticket->request.output);
    } else {
      const Range held = input_range(info.collective, request.message(), world_size, rank);
      sources.emplace_back(held.offset);
      if (info.is_read(rank)) sources.back().add(operation->payloads[rank].data(), held.count);
    }
  }
  const int64_t message_bytes = request.message().count * size_of(info.dtype);
  const ShmTransport* remote = remote_.load(std::memory_order_acquire);
  const bool alarm = remote != nullptr && remote->alarm_raised();
  const bool at_once = message_bytes * world_size <= kAtOnceBytes && !alarm;
  std::vector<Move> moves =
      moves_of(work_of(request, local_ranks_.front()), world_size, local_ranks_, senders,
               !overwrites && !at_once && message_bytes * world_size <= kForEachOutputBytes);
  const Arithmetic arithmetic{info.dtype, info.op, world_size};
  const auto traffic = in_place_traffic(request);
  if (!at_once) {
    return std::make_unique<InPlace>(arithmetic, std::move(sources), std::move(outputs),
                                     std::move(moves), traffic);
  }
  run_moves(arithmetic, sources, outputs, moves);
  finished_.push_back(finish_locked(operation, traffic.get()));
  return nullptr;
}

// One process: as if each element had crossed to where it is needed, in the direct schedule.
// Several: payloads went to everybody. The same for all executions of a call, so it is remembered.
std::shared_ptr<const std::vector<Traffic>> Communicator::in_place_traffic(const Request& request) {
  constexpr size_t kRemembered = 64;
  const CallInfo& info = *request.info;
  auto found = traffic_.find(info.signature.hash);
  if (found != traffic_.end()) return found->second;
  const int64_t element_bytes = size_of(info.dtype);
  const int world_size = spec_.world_size();
  auto traffic = std::make_shared<std::vector<Traffic>>(world_size);
  const int64_t payload_bytes = request.input.count() * element_bytes;
  int64_t sent_bytes = 0;  // by all
  for (int rank = 0; rank < world_size; ++rank) {
    if (spans_processes()) {
      const int64_t bytes = info.is_read(rank) ? payload_bytes : 0;
      (*traffic)[rank] = Traffic{(world_size - 1) * bytes, -bytes};
      sent_bytes += bytes;
    } else {
      CountingPrims counted;
      const World world{rank, world_size, std::max<int64_t>(1, request.message().count)};
      run_schedule(Algorithm::kDirect, 0, counted, world, work_of(request, rank));
      (*traffic)[rank] = Traffic{counted.bytes_sent(element_bytes, element_bytes),
                                 counted.bytes_received(element_bytes, element_bytes)};
    }
  }
  for (Traffic& of_rank : *traffic) of_rank.bytes_received += sent_bytes;
  if (traffic_.size() >= kRemembered) traffic_.clear();
  traffic_[info.signature.hash] = traffic;
  return traffic;
}

std::unique_ptr<Execution> Communicator::make_scheduled(const PendingOperation& operation,
                                                        int64_t chunk_elements) {
  const Request& request = operation.first_ticket()->request;
  const CallInfo& info = *request.info;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  for (int rank : local_ranks_) {
    inputs.push_back(operation.tickets[rank]->request.input);
    outputs.push_back(operation.tickets[rank]->request.output);
  }
  auto execution = std::make_unique<ScheduledExecution>(std::move(inputs), std::move(outputs));
  const int64_t slice_elements = slice_bytes_ / accumulator_size_of(info.dtype);
  for (size_t i = 0; i < local_ranks_.size(); ++i) {
    const World world{local_ranks_[i], spec_.world_size(), chunk_elements, hosts_.get()};
    const int channel_count = channels_of(operation.algorithm, info.collective);
    for (int channel = 0; channel < channel_count; ++channel) {
      PlanPrims prims;
      run_schedule(operation.algorithm, channel, prims, world, work_of(request, world.rank));
      const int index = static_cast<int>(i);
      execution->add(std::make_unique<Pipeline>(
          world.rank, channel, Arithmetic{info.dtype, info.op, spec_.world_size()}, slice_elements,
          &execution->input(index), &execution->output(index), prims.take(), *this));
    }
  }
  return execution;
}

}  // namespace jaxring
