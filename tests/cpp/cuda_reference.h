// Calls with random operands for the emulated GPUs, and what must come out.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "cuda_world.h"
#include "reference.h"

namespace jaxring::testing {

// One way to run a collective.
struct Road {
  Collective collective;
  Algorithm algorithm;
  cuda::Method method;

  bool rank_order() const {
    return info_of(algorithm).rank_order && method != cuda::Method::kMultimem;
  }
  std::string name() const {
    const char* methods[] = {"", " by packets", " in one shot", " in two shots", " by multimem"};
    return std::string(name_of(collective)) + ", " + std::string(info_of(algorithm).name) +
           methods[static_cast<int>(method)];
  }
};

inline std::vector<Road> all_roads() {
  std::vector<Road> roads;
  for (int c = 0; c <= static_cast<int>(Collective::kBarrier); ++c) {
    const Collective collective = static_cast<Collective>(c);
    for (const AlgorithmInfo& info : kAlgorithms) {
      if (info.algorithm == Algorithm::kAuto || !serves(info.algorithm, collective)) continue;
      if (!runs_on_devices(info.algorithm)) continue;
      if (info.algorithm != Algorithm::kDirect) {
        roads.push_back({collective, info.algorithm, cuda::Method::kBySize});
        continue;
      }
      roads.push_back({collective, info.algorithm, cuda::Method::kPackets});
      if (collective == Collective::kBarrier) continue;
      roads.push_back({collective, info.algorithm, cuda::Method::kOneShot});
      if (collective == Collective::kAllreduce) {
        roads.push_back({collective, info.algorithm, cuda::Method::kTwoShot});
        roads.push_back({collective, info.algorithm, cuda::Method::kMultimem});
      }
    }
  }
  return roads;
}

// An element; std::vector<bool> would hold bits.
template <typename T>
struct Item {
  T value;
};

// A call of a road on elements of type T; `count` is that of a piece.
template <typename T>
class TypedCall {
 public:
  EmulatedCall emulated;

  TypedCall(const Road& road, ReduceOp op, int world_size, int64_t piece, std::mt19937& random)
      : road_(road), world_size_(world_size), piece_(piece) {
    cuda::KernelCall& call = emulated.call;
    call.collective = road.collective;
    call.algorithm = road.algorithm;
    call.method = road.method;
    call.multimem = road.method == cuda::Method::kMultimem;
    call.op = op;
    call.dtype = DTypeTraits<T>::dtype;
    call.count = cuda::operand_in_pieces(road.collective) ? piece * world_size : piece;
    call.root = random() % world_size;
    set_destinations(random);
    const int64_t result = cuda::result_in_pieces(road.collective) ? piece * world_size : piece;
    const bool in_place = result == call.count && random() % 4 == 0;
    if (random() % 4 == 0) emulated.offset_bytes = sizeof(T) * (1 + random() % 3);
    const bool own_block = road.collective == Collective::kAllGather && random() % 2 == 0;
    if (own_block) emulated.own_block_bytes = piece * sizeof(T);
    for (int rank = 0; rank < world_size; ++rank) {
      emulated.inputs.emplace_back(EmulatedCall::room(call.count * sizeof(T)));
      if (!in_place) emulated.outputs.emplace_back(EmulatedCall::room(result * sizeof(T)));
      operands_.emplace_back(call.count);
      for (Item<T>& item : operands_.back()) item.value = random_element(random);
      std::memcpy(emulated.input(rank), operands_.back().data(), call.count * sizeof(T));
    }
  }

  void check(EmulatedCall& done) const {
    if (road_.collective == Collective::kBarrier) return;
    for (int rank = 0; rank < world_size_; ++rank) {
      const std::vector<Item<T>> expected = expected_of(done.call, rank);
      std::vector<Item<T>> result(expected.size());
      std::memcpy(result.data(), done.output(rank), result.size() * sizeof(T));
      for (size_t i = 0; i < result.size(); ++i) {
        ASSERT_TRUE(reference::same(result[i].value, expected[i].value))
            << road_.name() << ", " << name_of(done.call.op) << ", " << name_of(done.call.dtype)
            << ": rank " << rank << " of " << world_size_ << ", element " << i << " of "
            << result.size();
      }
    }
  }

 private:
  void set_destinations(std::mt19937& random) {
    std::vector<int> targets(world_size_);
    for (int rank = 0; rank < world_size_; ++rank) targets[rank] = rank;
    std::shuffle(targets.begin(), targets.end(), random);
    for (int rank = 0; rank < world_size_; ++rank) {
      emulated.call.destinations[rank] = random() % 4 == 0 ? -1 : targets[rank];
    }
  }

  // Small integers hide the order of a sum; where the order is promised it must show.
  T random_element(std::mt19937& random) const {
    const int integer = static_cast<int>(random() % 5) - 2;
    const float real = static_cast<float>(random() % 4096) / 2048.0f - 1.0f;
    if constexpr (is_complex_v<T>) {
      using Part = decltype(T::re);
      return {static_cast<Part>(road_.rank_order() ? real : integer), static_cast<Part>(integer)};
    } else if constexpr (is_float_v<T>) {
      return static_cast<T>(road_.rank_order() ? real : static_cast<float>(integer));
    } else {
      return static_cast<T>(std::is_same_v<T, bool> ? random() % 2 : random());
    }
  }

  T folded(ReduceOp op, int64_t element) const {
    using A = AccumulatorOf<T>;
    A sum = static_cast<A>(operands_[0][element].value);
    for (int rank = 1; rank < world_size_; ++rank) {
      sum = reference::combine<A>(op, sum, static_cast<A>(operands_[rank][element].value));
    }
    if constexpr (Mean::supports<T>) {
      if (op == ReduceOp::kMean) sum = reference::divided(sum, world_size_);
    }
    return static_cast<T>(sum);
  }

  std::vector<Item<T>> expected_of(const cuda::KernelCall& call, int rank) const {
    std::vector<Item<T>> result;
    const auto take = [&](int from, int64_t offset) {
      for (int64_t i = 0; i < piece_; ++i) result.push_back(operands_[from][offset + i]);
    };
    const auto fold = [&](int64_t offset) {
      for (int64_t i = 0; i < piece_; ++i) result.push_back({folded(call.op, offset + i)});
    };
    const std::vector<Item<T>> zeros(piece_, Item<T>{});
    switch (road_.collective) {
      case Collective::kAllreduce:
        fold(0);
        break;
      case Collective::kReduceScatter:
        fold(rank * piece_);
        break;
      case Collective::kReduce:
        if (rank != call.root) return zeros;
        fold(0);
        break;
      case Collective::kAllGather:
        for (int from = 0; from < world_size_; ++from) take(from, 0);
        break;
      case Collective::kAllToAll:
        for (int from = 0; from < world_size_; ++from) take(from, rank * piece_);
        break;
      case Collective::kBroadcast:
        take(call.root, 0);
        break;
      case Collective::kPermute:
        for (int from = 0; from < world_size_; ++from) {
          if (call.destinations[from] == rank) take(from, 0);
        }
        if (result.empty()) return zeros;
        break;
      case Collective::kBarrier:
        break;
    }
    return result;
  }

  const Road road_;
  const int world_size_;
  const int64_t piece_;
  std::vector<std::vector<Item<T>>> operands_;
};

}  // namespace jaxring::testing
