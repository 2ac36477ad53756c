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

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "xla_ffi/communicator/launches.h"
#include "xla_ffi/communicator/operation_table.h"
#include "xla_ffi/communicator/request.h"
#include "xla_ffi/communicator/stats.h"
#include "xla_ffi/transport/in_process.h"
#include "xla_ffi/transport/shm.h"

namespace jaxring {

struct CommunicatorSpec {
  std::string key;             // its name: the same on every rank
  std::vector<int> processes;  // by rank: which process holds it
  int self_process = 0;

  int world_size() const { return static_cast<int>(processes.size()); }
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

  // Connects to the other processes. Until then requests wait; they time out as any other.
  void attach(std::shared_ptr<Segment> segment);
  bool all_attached() const;
  Error not_attached_error(double waited_s) const;
  // Pending and later requests end with this error, here and on every other process that looks.
  void fail(Error error);
  std::optional<Error> broken() const;
  void close();
  // Waits until others can have all they need of this rank: announcements that have not found room
  // yet and, if asked for, operations that are under way (a script may end right after it has
  // launched its last step).
  void linger(std::chrono::milliseconds at_most, bool for_operations);

  // Its processes are numbered from 0 in order of their first rank, whatever the caller's numbers
  // were.
  const CommunicatorSpec& spec() const { return spec_; }
  int process_count() const { return process_count_; }
  std::vector<StatsRow> stats(bool reset);

  // Connections, for the executor
  Sender& sender(int from_rank, int to_rank, int channel) override;
  Receiver& receiver(int from_rank, int to_rank, int channel) override;
  void notify(int rank) override;

 private:
  using Operation = std::shared_ptr<PendingOperation>;
  enum RecordType : uint16_t { kArrive, kOrder, kDetail, kFailure };
  struct Finished;  // what is left to do for an operation once the mutex is released

  bool is_local(int rank) const { return spec_.processes[rank] == spec_.self_process; }
  bool is_leader() const { return is_local(0); }
  bool spans_processes() const { return process_count_ > 1; }

  // arrivals.cc: announcing and matching; all under mutex_
  std::optional<Error> arrive(const std::shared_ptr<Ticket>& ticket);
  std::optional<Error> check_arrival(const Ticket& ticket, const Key& key);
  void announce(const std::shared_ptr<Ticket>& ticket, const Operation& operation);
  void mark_announced(const Operation& operation, int rank, uint64_t signature);
  void note_launch(int rank, uint32_t launch);
  Operation find_or_add(const Key& key);
  void start_if_ready(const Operation& operation);
  void start(const Operation& operation);
  bool payloads_fit(const PendingOperation& operation) const;
  std::unique_ptr<Execution> make_in_place(const PendingOperation& operation, bool one_shot);
  std::unique_ptr<Execution> make_scheduled(const PendingOperation& operation,
                                            int64_t chunk_elements);

  // records.cc: what processes tell each other
  void post(const RecordHeader& header, const std::string& payload);
  bool flush_outbox();
  bool poll_records();
  void handle_record(const RecordHeader& header, const char* payload);
  void start_mismatch(const Key& key);
  void tell_standing();
  void note_detail(int rank, const Key& key, std::string text);
  std::string standing_of(int rank) const;

  // progress.cc: doing the work and watching the clock
  bool drive();
  Operation next_to_work_on();
  void finish(const Operation& operation);
  void wait_briefly(const Ticket& ticket);
  void need_progress_thread();
  void progress_loop();
  void sleep_until_news();
  void check_deadlines();
  void check_peers();
  void check_mismatch();

  // failures.cc: ending with an error
  void fail_locked(Error error, bool tell_others, std::vector<Finished>* finished);
  void fail_operation(const Operation& operation, const Error& error,
                      std::vector<Finished>* finished);
  void fail_launch(uint32_t launch, const Error& error, std::vector<Finished>* finished);
  Error timeout_error(const PendingOperation& operation) const;
  Error mismatch_error() const;
  std::string describe_rank(int rank) const;
  static void complete(std::vector<Finished> finished);
  Finished take_tickets(const Operation& operation, const std::optional<Error>& error);

  const CommunicatorSpec spec_;
  int process_count_ = 1;
  std::vector<int> local_ranks_;

  InProcessTransport in_process_;
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
  std::map<uint32_t, Error> failed_launches_;           // one process: only the launch is lost
  std::optional<Error> broken_;
  std::deque<std::pair<RecordHeader, std::string>> outbox_;  // posts that found no room yet
  std::map<std::tuple<std::string, std::string>, StatsRow> stats_;

  std::atomic<bool> mismatching_{false};  // ranks disagree; their signatures are being collected
  Key mismatched_;                        // the first operation known to be in dispute
  Clock::time_point mismatch_deadline_;
  std::map<int, std::string> details_;  // by rank: where it stands, seen from that operation

  std::optional<int> dead_process_;  // of the progress thread only

  int handed_over_ = 0;
  bool stopping_ = false;
  std::condition_variable
      news_;  // work for the progress thread: handed over, started, to post; or stop
  std::thread progress_thread_;
};

struct Communicator::Finished {
  std::vector<std::pair<Completion, std::optional<Error>>> completions;
};

}  // namespace jaxring
