#include "xla_ffi/cuda_ffi/seat.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/cuda_ffi/host_words.h"
#include "xla_ffi/cuda_ffi/seat_exchange.h"

namespace jaxring::cuda {
namespace {

void require(const Failure& failure) {
  if (failure) throw std::runtime_error(*failure);
}

uint64_t nanoseconds(double seconds) {
  constexpr double kLongest_s = 1e9;  // infinity fits no integer
  return static_cast<uint64_t>(std::clamp(seconds, 0.0, kLongest_s) * 1e9);
}

}  // namespace

Seat::Seat(std::string key, int rank, int world_size, int device)
    : key_(std::move(key)), rank_(rank), world_size_(world_size), device_(device) {
  if (world_size > kMaxRanks) {
    throw std::runtime_error("communicator " + key_ + " has " + std::to_string(world_size) +
                             " ranks, but " + std::to_string(kMaxRanks) +
                             " are the most on GPUs; reduce over a smaller axis first");
  }
  try {
    allocate();
  } catch (...) {
    release();
    throw;
  }
}

Seat::~Seat() { release(); }

void Seat::allocate() {
  const Runtime& runtime = *backend().runtime;
  const OnDevice on_device(device_);
  require(on_device.failure());
  require(backend().kernels->load_all());  // before any peer can spin
  arena_bytes_ = (backend().kernels->arena_bytes(world_size_) + 255) / 256 * 256;
  require(runtime.allocate_zeroed(&memory_, arena_bytes_ + kBoardBytes));
  void *host = nullptr, *on_gpu = nullptr;
  require(runtime.allocate_pinned(&host, &on_gpu, sizeof(HostWords)));
  words_ = static_cast<HostWords*>(host);
  words_on_device_ = static_cast<HostWords*>(on_gpu);
  require(runtime.create_stream(&stream_));
  require(runtime.create_stream(&log_stream_));
  card_.rank = rank_;
  runtime.identify(device_, &card_.host, &card_.pid);
  card_.device = device_;
  // Where IPC is not possible (some containers), ranks of one process still map each other.
  card_.exported = runtime.export_memory(memory_, &card_.memory) ? 0 : 1;
  card_.address = reinterpret_cast<uint64_t>(memory_);
  card_.bytes = arena_bytes_ + kBoardBytes;
  gethostname(card_.host_name, sizeof card_.host_name - 1);
}

// The others may still have it mapped: that keeps the memory alive until they let go.
void Seat::release() {
  const Runtime& runtime = *backend().runtime;
  const OnDevice on_device(device_);
  if (rail_ != nullptr) nccl_->comm_abort(rail_);
  for (void* mapping : imported_) runtime.release_import(mapping);
  if (stream_ != nullptr) runtime.release_stream(stream_);
  if (log_stream_ != nullptr) runtime.release_stream(log_stream_);
  if (memory_ != nullptr) runtime.release(memory_);
  if (words_ != nullptr) runtime.release_pinned(words_);
}

void* Seat::mapping_of(const Card& card) {
  const Runtime& runtime = *backend().runtime;
  if (card.host != card_.host || card.bytes != card_.bytes) return nullptr;
  if (card.pid == card_.pid) {
    bool can = false;
    if (runtime.can_access_peer(device_, card.device, &can) || !can) return nullptr;
    if (card.device != device_ && runtime.enable_peer_access(card.device)) return nullptr;
    return reinterpret_cast<void*>(card.address);
  }
  void* mapping = nullptr;
  if (card.exported == 0 || runtime.import_memory(card.memory, &mapping)) return nullptr;
  imported_.push_back(mapping);
  return mapping;
}

uint64_t Seat::map(std::vector<Card> cards) {
  for (const Card& card : cards) {
    if (card.format != Card::kFormat) {
      throw std::runtime_error("communicator " + key_ +
                               ": another rank runs another version of jaxring; install one");
    }
  }
  const OnDevice on_device(device_);
  require(on_device.failure());
  cards_ = std::move(cards);
  arenas_.assign(world_size_, nullptr);
  uint64_t mapped = 0;
  for (int rank = 0; rank < world_size_; ++rank) {
    void* arena = rank == rank_ ? memory_ : mapping_of(cards_[rank]);
    arenas_[rank] = static_cast<char*>(arena);
    if (arena != nullptr) mapped |= uint64_t{1} << rank;
  }
  return mapped;
}

void Seat::decide(const std::vector<uint64_t>& mapped, const Nccl* nccl, NcclComm clique) {
  plan_ = plan_for(rank_, cards_, mapped);
  nccl_ = nccl;
  clique_ = clique;
  if (plan_.reach != Reach::kMapped && (nccl == nullptr || clique == nullptr)) {
    throw std::runtime_error(
        "communicator " + key_ + ": " + plan_.reason +
        ", and without XLA's communicators (jaxlib 0.11.2 and newer, a mesh axis) there is no "
        "other way between them; upgrade jaxlib, or set fallback='lax'");
  }
  if (plan_.reach == Reach::kHosts) {
    require(nccl_failure(
        *nccl_, nccl_->comm_split(clique_, plan_.place_in_host, plan_.host_index, &rail_, nullptr),
        "ncclCommSplit"));
  }
  std::vector<int> members = plan_.host_ranks;
  if (plan_.reach == Reach::kMapped) {
    members.clear();
    for (int rank = 0; rank < world_size_; ++rank) members.push_back(rank);
  }
  world_.world_size = static_cast<int>(members.size());
  for (size_t i = 0; i < members.size(); ++i) {
    world_.arenas[i] = arenas_[members[i]];
    if (members[i] == rank_) world_.rank = static_cast<int>(i);
  }
  world_.status = &words_on_device_->status;
  world_.stalled = &words_on_device_->stalled;
  world_.abort = &words_on_device_->abort;
  ready_.store(true, std::memory_order_release);
}

void Seat::join_multicast(const Multicast::Gather& gather) {
  if (plan_.reach != Reach::kMapped) return;
  const OnDevice on_device(device_);
  require(on_device.failure());
  multicast_.set_up(cards_, rank_, gather);
  world_.window = multicast_.window().own;
  world_.multicast = multicast_.window().all;
}

std::string Seat::transport() const {
  switch (plan_.reach) {
    case Reach::kMapped:
      for (const Card& card : cards_) {
        if (card.pid != card_.pid) return "cuda_ipc";
      }
      return "cuda_in_process";
    case Reach::kHosts:
      return "cuda_ipc+nccl";
    case Reach::kNccl:
      return "nccl";
  }
  return "";
}

std::vector<std::string> Seat::all_gather(const std::string& text) {
  std::lock_guard<std::mutex> lock(gather_mutex_);
  SeatExchange exchange(*this);
  if (plan_.reach == Reach::kMapped) return exchange.over_boards(text);
  std::vector<std::string> texts = exchange.by_nccl(*nccl_, clique_, text);
  for (std::string& one : texts) one.resize(one.find_last_not_of('\0') + 1);
  return texts;
}

bool Seat::serves(const KernelCall& call, std::string* why_not) const {
  if (plan_.reach == Reach::kMapped) {
    return backend().kernels->serves(call, world_size_, why_not);
  }
  if (nccl_serves(call, why_not)) return true;
  *why_not += " (NCCL serves this call, since " + plan_.reason + ")";
  return false;
}

// Read anew for each launch; a captured graph keeps the value that it was captured with.
DeviceWorld Seat::world() const {
  DeviceWorld world = world_;
  world.timeout_ns = nanoseconds(settings().timeout_s);
  world.warn_ns = std::max<uint64_t>(1, nanoseconds(settings().warn_s));
  return world;
}

Failure Seat::run(const KernelCall& call, Stream stream) const {
  switch (plan_.reach) {
    case Reach::kMapped:
      return backend().kernels->launch(world(), call, stream);
    case Reach::kHosts:
      if (call.collective == Collective::kAllreduce) return run_across_hosts(call, stream);
      break;
    case Reach::kNccl:
      break;
  }
  return run_by_nccl(*nccl_, clique_, rank_, world_size_, call, stream);
}

// Reduce-scatter within the host, allreduce of each part along its rail, all-gather within the
// host: every byte crosses between hosts once, over all their network adapters.
Failure Seat::run_across_hosts(const KernelCall& call, Stream stream) const {
  const Kernels& kernels = *backend().kernels;
  const int64_t part = call.count / world_.world_size;
  const int64_t bytes = size_of(call.dtype);
  char* output = static_cast<char*>(call.output);
  if (part > 0) {
    char* own = output + world_.rank * part * bytes;
    KernelCall scatter = call;
    scatter.collective = Collective::kReduceScatter;
    scatter.algorithm = Algorithm::kAuto;
    scatter.count = part * world_.world_size;
    scatter.output = own;
    scatter.site = 0;  // the gather at its end counts for all
    if (Failure failure = kernels.launch(world(), scatter, stream)) return failure;
    if (Failure failure = allreduce_by_nccl(*nccl_, rail_, call, own, own, part, stream)) {
      return failure;
    }
    KernelCall gather = scatter;
    gather.collective = Collective::kAllGather;
    gather.site = call.site;
    gather.count = part;
    gather.input = own;  // its own block of the output, which an all_gather may have
    gather.output = output;
    if (Failure failure = kernels.launch(world(), gather, stream)) return failure;
  }
  const int64_t done = part * world_.world_size;
  if (done == call.count) return std::nullopt;
  return allreduce_by_nccl(*nccl_, clique_, call,
                           static_cast<const char*>(call.input) + done * bytes,
                           output + done * bytes, call.count - done, stream);
}

}  // namespace jaxring::cuda
