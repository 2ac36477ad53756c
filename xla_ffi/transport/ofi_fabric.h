// What all links of a communicator share: libfabric itself (found at run time), a domain of one
// network card, the queues of completions and events, and the endpoint that listens.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>

#include <string>

namespace jaxring {

// The functions of libfabric that are no inline ones of its headers.
struct LibFabric {
  decltype(&::fi_getinfo) getinfo;
  decltype(&::fi_freeinfo) freeinfo;
  decltype(&::fi_dupinfo) dupinfo;
  decltype(&::fi_fabric) fabric;
  decltype(&::fi_strerror) strerror;

  // Throws std::runtime_error that says what to install.
  static const LibFabric& instance();
};

class OfiFabric {
 public:
  // Listens at `interface`, a numeric address, and only there.
  OfiFabric(const std::string& provider, const std::string& interface);
  ~OfiFabric();
  OfiFabric(const OfiFabric&) = delete;

  std::string address() const;  // "host port"
  bool registers_memory() const;
  fid_domain* domain() const { return domain_; }
  fid_cq* completions() const { return completions_; }
  fid_eq* events() const { return events_; }

  // An endpoint towards `address`, or for what has asked to connect; enabled, with `context`.
  fid_ep* open(const std::string& address, void* context);
  fid_ep* open(fi_info* request, void* context);
  void reject(fi_info* request);
  static void free(fi_info* request) { LibFabric::instance().freeinfo(request); }
  // Sends the request to connect.
  void connect(fid_ep* endpoint, const std::string& address);

  // Sleeps until the bell has rung, which is then silent again, or `at_most_ms` has passed; if
  // `for_queues`, also until something has come. `may_sleep` is asked for before that, under the
  // lock that guards all else here.
  bool may_sleep();
  void sleep(int at_most_ms, int bell_fd, bool for_queues) const;

 private:
  fi_info* info_of(const std::string& host, const std::string& port, uint64_t flags) const;
  void check(long result, const char* what) const;
  static int wait_fd(fid* queue);
  void release();

  const LibFabric& library_;
  const std::string provider_;
  const std::string interface_;
  fi_info* info_ = nullptr;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_eq* events_ = nullptr;
  fid_cq* completions_ = nullptr;
  fid_pep* listener_ = nullptr;
};

}  // namespace jaxring
