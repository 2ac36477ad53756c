// How a seat fails: what its kernels report, as an error that names the peer.
#include <string>

#include "xla_ffi/communicator/settings.h"
#include "xla_ffi/cuda_ffi/host_words.h"

namespace jaxring::cuda {
namespace {

// Written by the GPU, so not by any thread that the compiler knows.
uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

}  // namespace

int Seat::rank_of_peer(int peer) const {
  const bool within_host = plan_.reach == Reach::kHosts;
  return within_host && peer < static_cast<int>(plan_.host_ranks.size()) ? plan_.host_ranks[peer]
                                                                         : peer;
}

Error Seat::stopped_error(uint64_t status) const {
  const int peer = rank_of_peer(peer_in(status));
  Error error;
  error.call = site(site_in(status)).label;
  error.kind = ErrorKind::kTimeoutError;
  error.rank = peer;
  error.missing_ranks = {peer};
  std::string who = "rank " + std::to_string(peer);
  if (peer < static_cast<int>(cards_.size())) {
    who = describe(cards_[peer]);
    error.host = cards_[peer].host_name;
    error.pid = cards_[peer].pid;
  }
  error.message = "communicator " + key_ + ": " +
                  (error.call.empty() ? "a collective" : error.call) + " on the GPU of rank " +
                  std::to_string(rank_) + " timed out: missing " + who +
                  "; see what that rank is doing, or raise timeout_s if it is slow (results since "
                  "then are not whole: their floats are NaN; start the job again)";
  return error;
}

std::optional<Error> Seat::failure() {
  if (retired_.load(std::memory_order_acquire)) return std::nullopt;
  if (!failed_.load(std::memory_order_acquire)) {
    const uint64_t status = load(&words_->status);
    if (status == 0) return std::nullopt;
    fail(stopped_error(status));
  }
  std::lock_guard<std::mutex> lock(failure_mutex_);
  return failure_;
}

bool Seat::stopped() const { return load(&words_->status) != 0; }

void Seat::fail(Error error) {
  {
    std::lock_guard<std::mutex> lock(failure_mutex_);
    if (!failure_) failure_ = std::move(error);
  }
  failed_.store(true, std::memory_order_release);
  __atomic_store_n(&words_->abort, uint64_t{1}, __ATOMIC_RELEASE);
}

}  // namespace jaxring::cuda
