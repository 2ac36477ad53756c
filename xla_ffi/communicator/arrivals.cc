// Announcing and matching. Everything here runs under the communicator's mutex.
#include <cstring>

#include "xla_ffi/algorithms/select.h"
#include "xla_ffi/communicator/communicator.h"
#include "xla_ffi/communicator/settings.h"

namespace jaxring {
namespace {

Selection selection_of(const CallInfo& info, int64_t count) {
  return select(info.algorithm, count, size_of(info.dtype), accumulator_size_of(info.dtype),
                info.chunk_bytes);
}

std::string packed(const Input& input, DType dtype) {
  const int64_t element_bytes = size_of(dtype);
  std::string bytes(input.count() * element_bytes, '\0');
  input.for_each_piece(Range{0, input.count()}, element_bytes, [&](const void* data, Range piece) {
    std::memcpy(&bytes[piece.offset * element_bytes], data, piece.count * element_bytes);
  });
  return bytes;
}

}  // namespace

std::optional<Error> Communicator::arrive(const std::shared_ptr<Ticket>& ticket) {
  if (broken_) return broken_;
  const Request& request = ticket->request;
  const Key key{launches_.ordinal_of(request.run_id), request.call, request.copy,
                request.iteration};
  if (std::optional<Error> error = check_arrival(*ticket, key)) return error;
  const Operation operation = find_or_add(key);
  if (operation->ticket_count++ == 0) operation->deadline = ticket->arrived + settings().timeout();
  operation->tickets[request.rank] = ticket;
  ++open_tickets_[request.rank];
  announce(ticket, operation);
  note_launch(request.rank, key.launch);
  mark_announced(operation, request.rank, request.info->signature.hash);
  return std::nullopt;
}

std::optional<Error> Communicator::check_arrival(const Ticket& ticket, const Key& key) {
  const int rank = ticket.request.rank;
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
  error.call = ticket.request.info->label();
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

void Communicator::announce(const std::shared_ptr<Ticket>& ticket, const Operation& operation) {
  if (!spans_processes()) return;
  const Request& request = ticket->request;
  RecordHeader header = header_of(operation->key);
  header.type = kArrive;
  header.rank = static_cast<uint16_t>(request.rank);
  header.signature = request.info->signature.hash;
  const bool one_shot = selection_of(*request.info, request.input.count()).one_shot;
  post(header, one_shot ? packed(request.input, request.info->dtype) : std::string());
}

// A rank's launches run in order, so one that has come to a later launch will never announce what
// others still wait for in an earlier one.
void Communicator::note_launch(int rank, uint32_t launch) {
  if (latest_launch_[rank] && *latest_launch_[rank] >= launch) return;
  latest_launch_[rank] = launch;
  for (const auto& [key, operation] : table_) {
    if (key.launch < launch && !operation->announced[rank]) return start_mismatch(key);
  }
}

void Communicator::mark_announced(const Operation& operation, int rank, uint64_t signature) {
  if (operation->announced[rank]) return;
  operation->announced[rank] = signature;
  ++operation->announced_count;
  if (!operation->signatures_agree()) return start_mismatch(operation->key);
  start_if_ready(operation);
}

void Communicator::start_if_ready(const Operation& operation) {
  if (operation->execution || operation->announced_count < spec_.world_size()) return;
  operation->ready = Clock::now();
  const Request& request = operation->first_ticket()->request;
  const Selection selection = selection_of(*request.info, request.input.count());
  const bool needs_order = spans_processes() && spec_.world_size() > 1 && !selection.one_shot;
  if (needs_order && is_leader()) {
    RecordHeader header = header_of(operation->key);
    header.type = kOrder;
    post(header, std::string());
    operation->ordered = true;
    scheduled_.push_back(operation);
  }
  // Elsewhere the leader's order puts it there; it may have come already or be on its way.
  if (!needs_order || operation->ordered) start(operation);
}

void Communicator::start(const Operation& operation) {
  const Request& request = operation->first_ticket()->request;
  const Selection selection = selection_of(*request.info, request.input.count());
  operation->algorithm = selection.algorithm;
  const bool in_place =
      selection.algorithm == Algorithm::kDirect && (selection.one_shot || !spans_processes());
  if (in_place) {
    if (!payloads_fit(*operation)) return start_mismatch(operation->key);
    operation->execution = make_in_place(*operation, spans_processes());
    immediate_.push_back(operation);
  } else {
    operation->execution = make_scheduled(*operation, selection.chunk_elements);
    if (!operation->ordered) scheduled_.push_back(operation);
  }
  started_.fetch_add(1, std::memory_order_release);
  news_.notify_all();
}

// Equal signatures mean equal sizes; but a payload comes from another process, so it is checked.
bool Communicator::payloads_fit(const PendingOperation& operation) const {
  const Request& request = operation.first_ticket()->request;
  const size_t expected = request.input.count() * size_of(request.info->dtype);
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (!is_local(rank) && operation.payloads[rank].size() != expected) return false;
  }
  return true;
}

std::unique_ptr<Execution> Communicator::make_in_place(const PendingOperation& operation,
                                                       bool one_shot) {
  const CallInfo& info = *operation.first_ticket()->request.info;
  const int64_t count = operation.first_ticket()->request.input.count();
  std::vector<Input> sources(spec_.world_size());
  std::vector<Output> outputs;
  for (int rank = 0; rank < spec_.world_size(); ++rank) {
    if (const auto& ticket = operation.tickets[rank]) {
      sources[rank] = ticket->request.input;
      outputs.push_back(ticket->request.output);
    } else {
      sources[rank].add(operation.payloads[rank].data(), count);
    }
  }
  return std::make_unique<InPlaceDirect>(Arithmetic{info.dtype, info.op, spec_.world_size()},
                                         std::move(sources), std::move(outputs), one_shot);
}

std::unique_ptr<Execution> Communicator::make_scheduled(const PendingOperation& operation,
                                                        int64_t chunk_elements) {
  const CallInfo& info = *operation.first_ticket()->request.info;
  const Range message{0, operation.first_ticket()->request.input.count()};
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  for (int rank : local_ranks_) {
    inputs.push_back(operation.tickets[rank]->request.input);
    outputs.push_back(operation.tickets[rank]->request.output);
  }
  auto execution = std::make_unique<ScheduledExecution>(std::move(inputs), std::move(outputs));
  const int64_t slice_elements = kFifoSlotBytes / accumulator_size_of(info.dtype);
  for (size_t i = 0; i < local_ranks_.size(); ++i) {
    const World world{local_ranks_[i], spec_.world_size(), chunk_elements};
    for (int channel = 0; channel < info_of(operation.algorithm).channels; ++channel) {
      PlanPrims prims;
      run_allreduce(operation.algorithm, channel, prims, world, message);
      const int index = static_cast<int>(i);
      execution->add(std::make_unique<Pipeline>(
          world.rank, channel, Arithmetic{info.dtype, info.op, spec_.world_size()}, slice_elements,
          &execution->input(index), &execution->output(index), prims.take(), *this));
    }
  }
  return execution;
}

}  // namespace jaxring
