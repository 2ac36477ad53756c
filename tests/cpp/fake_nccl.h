// NCCL among the threads of one process: each operation is a meeting of its communicator's ranks on
// their streams.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "tests/cpp/fake_gpu.h"
#include "xla_ffi/cuda_ffi/nccl.h"

namespace jaxring::cuda::fake {

// Where the ranks of a clique meet; each brings a pointer and gets everybody's.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}
  int ranks() const { return ranks_; }

  std::vector<const void*> meet(int rank, const void* mine) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t round = round_;
    arrivals_[round].resize(ranks_);
    arrivals_[round][rank] = mine;
    if (++come_ == ranks_) {
      come_ = 0;
      ++round_;
      all_here_.notify_all();
    }
    all_here_.wait(lock, [&] { return round_ > round; });
    return arrivals_[round];
  }

 private:
  const int ranks_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::map<uint64_t, std::vector<const void*>> arrivals_;
  uint64_t round_ = 0;
  int come_ = 0;
};

}  // namespace jaxring::cuda::fake

// What ncclComm_t points to, here.
struct ncclComm {
  std::shared_ptr<jaxring::cuda::fake::Meeting> clique;
  int rank;
};

namespace jaxring::cuda::fake {

struct NcclCounts {
  std::atomic<int> all_reduces{0};
  std::atomic<int> splits{0};
};
inline NcclCounts& nccl_counts() {
  static NcclCounts counts;
  return counts;
}

// Runs f(everybody's inputs) on the stream, and lets nobody go on before all have read.
template <class F>
int together(NcclComm comm, const void* input, Stream stream, F f) {
  stream->enqueue([=] {
    f(comm->clique->meet(comm->rank, input));
    comm->clique->meet(comm->rank, nullptr);
  });
  return 0;
}

inline int all_reduce(const void* in, void* out, size_t count, int dtype, int, NcclComm comm,
                      Stream stream) {
  ++nccl_counts().all_reduces;
  if (dtype != 7) return 4;  // ncclInvalidArgument
  return together(comm, in, stream, [=](const std::vector<const void*>& inputs) {
    std::vector<float> sums(count);
    for (const void* input : inputs) {
      for (size_t i = 0; i < count; ++i) sums[i] += static_cast<const float*>(input)[i];
    }
    comm->clique->meet(comm->rank, nullptr);  // `out` may be `in`
    std::memcpy(out, sums.data(), count * sizeof(float));
  });
}

inline int all_gather(const void* in, void* out, size_t bytes, int, NcclComm comm, Stream stream) {
  return together(comm, in, stream, [=](const std::vector<const void*>& inputs) {
    for (size_t r = 0; r < inputs.size(); ++r) {
      std::memcpy(static_cast<char*>(out) + r * bytes, inputs[r], bytes);
    }
  });
}

inline int comm_split(NcclComm comm, int color, int key, NcclComm* child, void*) {
  ++nccl_counts().splits;
  const std::pair<int, int> mine{color, key};
  std::vector<std::pair<int, int>> members;
  for (const void* other : comm->clique->meet(comm->rank, &mine)) {
    members.push_back(*static_cast<const std::pair<int, int>*>(other));
  }
  int size = 0, rank = 0;
  for (const auto& [other_color, other_key] : members) {
    if (other_color != color) continue;
    ++size;
    rank += other_key < key;
  }
  std::shared_ptr<Meeting> meeting;
  if (rank == 0) meeting = std::make_shared<Meeting>(size);
  const std::pair<std::pair<int, int>, std::shared_ptr<Meeting>> offer{{color, rank}, meeting};
  for (const void* other : comm->clique->meet(comm->rank, &offer)) {
    const auto& [place, offered] = *static_cast<decltype(&offer)>(other);
    if (place.first == color && place.second == 0) meeting = offered;
  }
  comm->clique->meet(comm->rank, nullptr);
  *child = new ncclComm{meeting, rank};
  return 0;
}

inline const Nccl nccl = {
    22903,
    [](int) { return "a fake error"; },
    [](NcclComm comm, int* count) {
      *count = comm->clique->ranks();
      return 0;
    },
    [](NcclComm comm, int* rank) {
      *rank = comm->rank;
      return 0;
    },
    comm_split,
    [](NcclComm comm) {
      delete comm;
      return 0;
    },
    all_reduce,
    /*reduce=*/nullptr,
    /*reduce_scatter=*/nullptr,
    all_gather,
    /*broadcast=*/nullptr,
    /*send=*/nullptr,
    /*receive=*/nullptr,
    [] { return 0; },
    [] { return 0; },
};

}  // namespace jaxring::cuda::fake
