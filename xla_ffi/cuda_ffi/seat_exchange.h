// Short texts from every rank to every rank, driven by the host on a stream of the seat's own: over
// the ranks' mapped memory (a board of two slots behind each arena), or by NCCL where it is not
// mapped. For set-up and first calls only: it waits.
//
// Two slots are enough: a rank that writes text n has seen everybody's text n - 1, which they wrote
// after they had read all of n - 2.
#pragma once

#include <string>
#include <vector>

#include "xla_ffi/cuda_ffi/seat.h"

namespace jaxring::cuda {

inline constexpr int64_t kTextBytes = 1016;  // longer ones are cut
inline constexpr int64_t kSlotBytes = 8 + kTextBytes;
inline constexpr int64_t kBoardBytes = 2 * kSlotBytes;

// Throws Failed when not all came within the setting timeout_s, or CUDA reports an error.
class SeatExchange {
 public:
  explicit SeatExchange(Seat& seat);
  ~SeatExchange();

  std::vector<std::string> over_boards(const std::string& text);
  // Also before the seat is ready: it is how a clique's ranks meet. `bytes` at most kTextBytes.
  std::vector<std::string> by_nccl(const Nccl& nccl, NcclComm comm, const std::string& bytes);

 private:
  void read_board(int rank, uint64_t number, std::string* text);
  // Until the stream has done all it was given; false at the deadline.
  bool settle(SetUpClock::time_point deadline);
  void require_settled(const std::string& what);
  [[noreturn]] void fail_late(const std::vector<int>& missing);
  void check(const Failure& failure);

  Seat& seat_;
  OnDevice on_device_;
  const SetUpClock::time_point deadline_;
};

}  // namespace jaxring::cuda
