// A communicator: an ordered set of ranks, some of them devices of this process, the others
// elsewhere.
//
// A rank arrives with a Request; its arrival is announced to all processes under the request's key.
// When every rank has announced a key the operation starts: small ones at once, from payloads that
// came with the announcements; those that use FIFOs in one order that the leader (the process of
// rank 0) states, taken only among keys that all have announced. The arriving thread waits a moment
// and lends a hand; then it hands over to the communicator's progress thread and its caller gets a
// future instead.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "xla_ffi/algorithms/select.h"
#include "xla_ffi/communicator/flight_recorder.h"
#include "xla_ffi/communicator/launches.h"
#include "xla_ffi/communicator/operation_table.h"
#include "xla_ffi/communicator/request.h"
#include "xla_ffi/communicator/stats.h"
#include "xla_ffi/core/host_layout.h"
#include "xla_ffi/host/in_place.h"
#include "xla_ffi/transport/in_process.h"
#include "xla_ffi/transport/shm.h"

namespace jaxring {

struct CommunicatorSpec {
  std::string key;             // its name: the same on every rank
  std::vector<int> processes;  // by rank: which process holds it
  int self_process = 0;

  int world_size() const { return static_cast<int>(processes.size()); }
  // The first rank of this process; a Communicator's only one.
  int self_rank() const {
    return static_cast<int>(std::find(processes.begin(), processes.end(), self_process) -
                            processes.begin());
  }
};

class Communicator final : public Connections {
 public:
  explicit Communicator(CommunicatorSpec spec);
  ~Communicator() override;

  // Runs the request, or hands it over. Empty: it was handed over, and the completion that
  // `make_completion` returned (called at most once, before submit returns) will be called, from
  // any thread. Otherwise done: the inner value is the error, if any. Buffers are not touched after
  // either.
  std::optional<std::optional<Error>> submit(Request request,
                                             const std::function<Completion()>& make_completion);

  // What schedules are told of hosts; before attach(). Tests call it, listen() does so too.
  void set_hosts(const std::vector<int>& by_rank);
  // Where ranks are on several hosts (`hosts` by rank, any numbers), before attach(): listens, and
  // gives the address for the other hosts' connect(). Throws std::runtime_error with the reason.
  std::string listen(const std::vector<int>& hosts, const std::string& provider,
                     const std::string& interface, const std::string& secret);
  // Connects to the other processes of this host. Until all are connected requests wait; they time
  // out as any other.
  void attach(std::shared_ptr<Segment> segment);
  // After attach(): connects to those of other hosts; `addresses` by rank.
  void connect(const std::vector<std::string>& addresses);
  bool all_attached() const;
  Error not_attached_error(double waited_s) const;
  // Pending and later requests end with this error, here and on every other process that looks.
  void fail(Error error);
  void abort(const std::string& reason);  // the same, with an AbortedError that names this rank
  std::optional<Error> broken() const;
  // The same, having heard what other processes say of a failure: while no operation is under way
  // nobody else reads that.
  std::optional<Error> broken_anywhere();
  bool closed() const { return stopping_; }
  void close();
  // Waits until others can have all they need of this rank: announcements that have not found room
  // yet and, if asked for, operations that are under way (a script may end right after it has
  // launched its last step).
  void linger(std::chrono::milliseconds at_most, bool for_operations);

  // Its processes are numbered from 0 in order of their first rank, whatever the caller's numbers
  // were.
  const CommunicatorSpec& spec() const { return spec_; }
  bool spans_processes() const { return process_count_ > 1; }
  int process_count() const { return process_count_; }
  std::vector<StatsRow> stats(bool reset);
  std::vector<FlightEntry> flight() const;

  // Connections, for the executor
  Sender& sender(int from_rank, int to_rank, int channel) override;
  Receiver& receiver(int from_rank, int to_rank, int channel) override;
  void notify(int rank) override;

 private:
  using Operation = std::shared_ptr<PendingOperation>;
  // How long an arriving thread sleeps on for others before it hands over: long where that has been
  // worth it of late, else (unordered calls, ranks that work unequally long) hardly at all.
  class Patience {
   public:
    std::chrono::microseconds time() const {
      return std::chrono::microseconds(us_.load(std::memory_order_relaxed));
    }
    void was_rewarded() {
      const int64_t us = us_.load(std::memory_order_relaxed);
      if (us < kMost) us_.store(std::min(kMost, 2 * us + 10), std::memory_order_relaxed);
    }
    void was_in_vain() {
      us_.store(std::max(kLeast, us_.load(std::memory_order_relaxed) / 2),
                std::memory_order_relaxed);
    }

   private:
    static constexpr int64_t kLeast = 50, kMost = 500;
    std::atomic<int64_t> us_{kMost};
  };
  enum RecordType : uint16_t { kArrive, kOrder, kDetail, kFailure, kLeave, kWaits };
  // What is left to do for an operation once the mutex is released.
  struct Finished {
    std::vector<std::pair<Completion, std::optional<Error>>> completions;
  };
  // Of a rank that has come to the meeting; on the stack of its thread, since another thread of the
  // same device may take a seat before this one has seen that its own is done with.
  struct alignas(JR_CACHE_LINE) Seat {
    explicit Seat(const Request& r) : request(r) {}
    std::atomic<uint32_t> state{Ticket::kWaiting};  // a futex
    const Request& request;
    const Clock::time_point arrived = Clock::now();
    std::shared_ptr<Ticket> ticket;  // once the meeting has been dissolved
  };
  struct Offer {  // a rank's announcement, still in its ring
    RecordHeader header;
    const char* payload = nullptr;
  };

  bool is_local(int rank) const { return spec_.processes[rank] == spec_.self_process; }
  bool is_leader() const { return is_local(0); }
  bool waits_here() const;  // for any operation
  Operation oldest_of_ours() const;
  bool has_left(int process) const;
  void share_cores(int64_t ranks);
  static std::string host_name();
  Error error_of_this_process(ErrorKind kind) const;

  // arrivals.cc: announcing and matching; all under mutex_
  Key key_of(const Request& request);
  std::optional<Error> check_arrival(const Request& request, const Key& key) const;
  void arrive(const std::shared_ptr<Ticket>& ticket, const Key& key, bool announced);
  void announce(const Request& request, const Key& key);
  void mark_announced(const Operation& operation, int rank, uint64_t signature);
  void note_launch(int rank, uint32_t launch);
  bool somebody_is_past(const PendingOperation& operation) const;
  Operation find_or_add(const Key& key);
  void start_if_ready(const Operation& operation);
  void start(const Operation& operation);
  bool payloads_fit(const PendingOperation& operation) const;
  Selection selection_of(const Request& request) const;
  Work work_of(const Request& request, int rank) const;
  void call_for_help(const PendingOperation& operation);
  std::unique_ptr<Execution> start_in_place(const Operation& operation);
  std::shared_ptr<const std::vector<Traffic>> in_place_traffic(const Request& request);
  std::unique_ptr<Execution> make_scheduled(const PendingOperation& operation,
                                            int64_t chunk_elements);

  // exchange.cc: small messages between processes, past all of the above
  enum class Exchange { kNotTried, kAnnounced, kDone };
  Exchange try_exchange(const Request& request, const Key& key, std::unique_lock<std::mutex>& lock);
  bool can_exchange(const Request& request) const;
  bool peers_agree(const Request& request, const Key& key);
  void combine(const Request& request);
  bool fold_offers(const Request& request) const;
  void note_exchanged(const Request& request, const Key& key, Clock::time_point arrived);

  // meeting.cc: small messages within a process, likewise
  bool can_meet(const Request& request) const;
  bool try_meeting(const Request& request, const Key& key, std::unique_lock<std::mutex>& lock,
                   std::shared_ptr<Ticket>* ticket);
  bool wait_in_seat(Seat& seat);
  void hold_meeting(int last);
  void leave_seat(int rank);
  void dissolve_meeting();

  // records.cc: what processes tell each other
  void post(const RecordHeader& header, const char* payload);
  void post(RecordHeader header, const std::string& payload);
  bool flush_outbox();
  bool poll_records();
  void handle_record(const RecordHeader& header, const char* payload);
  void start_mismatch(const Key& key);
  void tell_standing(bool also_late);
  void tell_leaving();
  void note_detail(int rank, const Key& key, std::string text);
  const PendingOperation* standing_in(int rank) const;
  bool may_still_come(int rank) const;
  std::string standing_of(int rank) const;

  // progress.cc: doing the work and watching the clock
  bool drive(int rank);
  Operation next_to_work_on();
  void finish(const Operation& operation);
  Finished finish_locked(const Operation& operation, const std::vector<Traffic>* traffic);
  void take_finished(std::vector<Finished>* finished);
  void wait_briefly(Ticket& ticket);
  void nap(Ticket& ticket, std::chrono::microseconds at_most);
  bool hand_over(Ticket& ticket, const std::function<Completion()>& make_completion);
  bool need_progress_thread();
  Error no_thread_error(const Request& request, const Key& key) const;
  void progress_loop();
  void sleep_until_news();

  // watch.cc: what is looked after while somebody waits
  void check_interrupts();
  void check_stalls();
  void check_deadlines();
  void check_mismatch();
  void check_peers();

  // roll_call.cc: who holds up an operation that all have begun
  bool roll_call_is_due(const PendingOperation& operation, Clock::time_point now) const;
  void tell_waits(PendingOperation& operation);
  void note_waits(int rank, const Key& key, const char* payload, size_t bytes);
  std::vector<int> holding_up(const PendingOperation& operation) const;

  // failures.cc: ending with an error
  void fail_locked(Error error, bool tell_others, std::vector<Finished>* finished);
  void fail_widely(uint32_t launch, const Error& error, std::vector<Finished>* finished);
  void fail_operation(const Operation& operation, const Error& error,
                      std::vector<Finished>* finished);
  void fail_launch(uint32_t launch, const Error& error, std::vector<Finished>* finished);
  static void complete(std::vector<Finished> finished);
  Finished take_tickets(const Operation& operation, const std::optional<Error>& error);
  void record_end(int rank, const Key& key, const Ending& ending);

  // diagnoses.cc: what errors say
  bool waits_for_one_that_left(const PendingOperation& operation) const;
  Error left_error(const PendingOperation& operation) const;
  Error links_error(const std::string& why) const;
  Error timeout_error(const PendingOperation& operation) const;
  Error mismatch_error() const;
  std::string describe_rank(int rank) const;
  std::string describe_call(const PendingOperation& operation) const;
  std::string describe_missing(const std::vector<int>& ranks) const;

  const CommunicatorSpec spec_;
  int process_count_ = 1;
  std::vector<int> local_ranks_;
  std::unique_ptr<const HostLayout> hosts_;  // null: all ranks are on one host

  InProcessTransport in_process_;
  std::vector<int> process_hosts_;        // by process; empty where all are on one host
  int64_t slice_bytes_ = kFifoSlotBytes;  // what every FIFO's slot has room for
  std::unique_ptr<Links> links_;          // until attach() takes it
  std::unique_ptr<ShmTransport> remote_owner_;
  std::atomic<ShmTransport*> remote_{nullptr};

  mutable std::mutex mutex_;
  std::mutex poll_mutex_;  // taken before mutex_, never after
  Launches launches_;
  OperationTable table_;
  std::deque<Operation> immediate_;  // started; in any order
  std::deque<Operation>
      scheduled_;  // in the order in which FIFOs carry them; the first may not have started
  std::atomic<int> started_{0};  // how many have, for a look without the mutex
  std::vector<std::optional<uint32_t>> latest_launch_;  // by rank
  std::vector<int> open_tickets_;                       // by rank
  std::vector<bool> left_;                              // by rank: has closed the communicator
  std::map<uint32_t, Error> failed_launches_;           // one process: only the launch is lost
  std::optional<Error> broken_;
  std::deque<std::pair<RecordHeader, std::string>> outbox_;  // posts that found no room yet
  CountersByCall stats_;
  std::vector<Finished> finished_;  // to be completed by whoever releases the mutex
  std::unordered_map<uint64_t, std::shared_ptr<const std::vector<Traffic>>> traffic_;  // by call
  std::vector<Seat*> seats_;  // by rank; null: free
  int seated_ = 0;
  Patience patience_;
  std::chrono::microseconds spin_{0};  // before a rank's thread sleeps; of a Backoff
  Key meeting_key_;
  uint64_t meeting_signature_ = 0;
  std::vector<Offer> offers_;  // by rank, of the exchange under way; under poll_mutex_
  FlightRecorder flight_;

  std::atomic<bool> mismatching_{false};  // ranks disagree; their signatures are being collected
  Key mismatched_;                        // the first operation known to be in dispute
  Clock::time_point late_deadline_, mismatch_deadline_;
  std::map<int, std::string> details_;  // by rank: where it stands, seen from that operation

  std::optional<int> dead_process_;  // of the progress thread only

  int handed_over_ = 0;
  std::atomic<bool> stopping_{false};
  std::condition_variable
      news_;  // work for the progress thread: handed over, started, to post; or stop
  std::thread progress_thread_;
};

}  // namespace jaxring
