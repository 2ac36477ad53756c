// Connections to the processes of other hosts. They carry the slices of FIFOs and the records that
// a process posts; what comes in lies in memory, as if its sender were on this host.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "xla_ffi/core/fifo.h"
#include "xla_ffi/transport/record_ring.h"

namespace jaxring {

struct LinksSpec {
  std::string name;            // of the communicator, which both sides must agree on
  std::vector<int> processes;  // by rank: which process holds it
  std::vector<int> hosts;      // by process: which host it is on
  int self_process = 0;
  int64_t slice_bytes = kFifoSlotBytes;  // the largest that a FIFO carries, equal on all processes
  std::string provider;                  // libfabric's name: tcp, verbs
  std::string interface;  // the numeric address of this host to listen at, and only there
  std::string secret;     // of the job; every connection proves that both sides know it

  int process_count() const { return static_cast<int>(hosts.size()); }
  bool is_remote(int process) const { return hosts[process] != hosts[self_process]; }
};

class Links {
 public:
  virtual ~Links() = default;
  // "host port", for the others' connect().
  virtual std::string address() const = 0;
  // Begins to connect; `addresses` by process, empty for those of this host.
  virtual void connect(const std::vector<std::string>& addresses) = 0;

  // What is posted in `own` from here on goes to every remote process; `cursors`, by process, are
  // theirs. `wake` wakes this process's sleepers after something has come. Called once, before
  // connect().
  virtual void bind(RecordRing own, std::vector<RecordCursor*> cursors,
                    std::function<void()> wake) = 0;
  // Says goodbye, once all that was said has been heard, and ends all connections.
  virtual void disconnect() = 0;
  // Where a remote process's records arrive, and how far we have read them.
  virtual RecordRing inbox(int process) = 0;
  virtual RecordCursor& inbox_cursor(int process) = 0;

  virtual bool crosses(int from_rank, int to_rank) const = 0;
  virtual Sender& sender(int from_rank, int to_rank, int channel) = 0;
  virtual Receiver& receiver(int from_rank, int to_rank, int channel) = 0;

  // Sends and receives what can be now; returns at once. Any thread may call it, also while another
  // one does.
  virtual void progress() = 0;
  // The part of it that what we have just written, or read, of a process's FIFO calls for.
  virtual void push(int process) = 0;
  // Who has called progress() again and again stops doing so.
  virtual void will_sleep() = 0;
  // Tells every remote process that this one has failed; see ShmTransport::raise_alarm.
  virtual void raise_alarm() = 0;
  virtual bool alarm_raised() const = 0;

  virtual bool connected(int process) const = 0;
  virtual bool is_dead(int process) const = 0;  // the connection has ended without a goodbye
  virtual int64_t pid_of(int process) const = 0;
  virtual std::string host_of(int process) const = 0;
  // Why this side of the links has failed, for want of memory perhaps; empty: it has not. Ends of
  // FIFOs asked for after that may be dumb, and connections may have ended.
  virtual std::string failure() const = 0;
};

// Throws std::runtime_error with a sentence that says what to install or to change.
std::unique_ptr<Links> make_links(LinksSpec spec);

}  // namespace jaxring
