#if JAXRING_HAS_LIBFABRIC
#include "xla_ffi/transport/ofi_fabric.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace jaxring {
namespace {

constexpr uint32_t kApiVersion = FI_VERSION(1, 14);

void* open_library() {
  const char* path = std::getenv("JAXRING_LIBFABRIC");
  void* library =
      dlopen(path != nullptr && *path != '\0' ? path : "libfabric.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw std::runtime_error(
        "ranks are on different hosts, which needs libfabric (" + std::string(dlerror()) +
        "); install it on every host (Debian, Ubuntu: apt-get install libfabric1; or pip install "
        "mpich and name the libfabric.so.1 in it by JAXRING_LIBFABRIC)");
  }
  return library;
}

std::pair<std::string, std::string> host_and_port(const std::string& address) {
  const size_t space = address.find(' ');
  if (space == std::string::npos) {
    throw std::runtime_error("jaxring: '" + address + "' is no address of a link (host port)");
  }
  return {address.substr(0, space), address.substr(space + 1)};
}

}  // namespace

const LibFabric& LibFabric::instance() {
  static const LibFabric functions = [] {
    void* library = open_library();
    auto find = [&](const char* name) {
      void* found = dlsym(library, name);
      if (found == nullptr) {
        throw std::runtime_error(std::string("libfabric has no ") + name + "; install a newer one");
      }
      return found;
    };
    LibFabric f;
    f.getinfo = reinterpret_cast<decltype(f.getinfo)>(find("fi_getinfo"));
    f.freeinfo = reinterpret_cast<decltype(f.freeinfo)>(find("fi_freeinfo"));
    f.dupinfo = reinterpret_cast<decltype(f.dupinfo)>(find("fi_dupinfo"));
    f.fabric = reinterpret_cast<decltype(f.fabric)>(find("fi_fabric"));
    f.strerror = reinterpret_cast<decltype(f.strerror)>(find("fi_strerror"));
    return f;
  }();
  return functions;
}

OfiFabric::OfiFabric(const std::string& provider, const std::string& interface)
    : library_(LibFabric::instance()), provider_(provider), interface_(interface) {
  try {
    info_ = info_of(interface, "0", FI_SOURCE);
    check(library_.fabric(info_->fabric_attr, &fabric_, nullptr), "open its fabric");
    fi_eq_attr events{};
    events.wait_obj = FI_WAIT_FD;
    check(fi_eq_open(fabric_, &events, &events_, nullptr), "make an event queue");
    check(fi_domain(fabric_, info_, &domain_, nullptr), "open its domain");
    fi_cq_attr completions{};
    completions.format = FI_CQ_FORMAT_MSG;
    completions.wait_obj = FI_WAIT_FD;
    completions.size = 16384;
    check(fi_cq_open(domain_, &completions, &completions_, nullptr), "make a completion queue");
    check(fi_passive_ep(fabric_, info_, &listener_, nullptr), "make a listening endpoint");
    check(fi_pep_bind(listener_, &events_->fid, 0), "bind it");
    check(fi_listen(listener_), "listen");
  } catch (...) {
    release();
    throw;
  }
}

OfiFabric::~OfiFabric() { release(); }

void OfiFabric::release() {
  if (listener_ != nullptr) fi_close(&listener_->fid);
  if (completions_ != nullptr) fi_close(&completions_->fid);
  if (domain_ != nullptr) fi_close(&domain_->fid);
  if (events_ != nullptr) fi_close(&events_->fid);
  if (fabric_ != nullptr) fi_close(&fabric_->fid);
  if (info_ != nullptr) library_.freeinfo(info_);
}

fi_info* OfiFabric::info_of(const std::string& host, const std::string& port,
                            uint64_t flags) const {
  fi_info* hints = library_.dupinfo(nullptr);
  if (hints == nullptr) throw std::bad_alloc();
  hints->ep_attr->type = FI_EP_MSG;
  hints->caps = FI_MSG;
  hints->mode = FI_CONTEXT;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->fabric_attr->prov_name = strdup(provider_.c_str());  // freed with the hints
  fi_info* info = nullptr;
  const int result = library_.getinfo(kApiVersion, host.c_str(), port.c_str(), flags, hints, &info);
  library_.freeinfo(hints);
  if (result != 0) {
    throw std::runtime_error("libfabric's provider " + provider_ + " cannot use " + host + " (" +
                             library_.strerror(-result) +
                             "); choose another by JAXRING_TRANSPORT or JAXRING_INTERFACE");
  }
  return info;
}

void OfiFabric::check(long result, const char* what) const {
  if (result == 0) return;
  throw std::runtime_error("libfabric's provider " + provider_ + " could not " + what + " at " +
                           interface_ + " (" + library_.strerror(static_cast<int>(-result)) + ")");
}

bool OfiFabric::registers_memory() const {
  return (info_->domain_attr->mr_mode & FI_MR_LOCAL) != 0;
}

std::string OfiFabric::address() const {
  sockaddr_storage name{};
  size_t bytes = sizeof name;
  check(fi_getname(&listener_->fid, &name, &bytes), "tell its address");
  char host[INET6_ADDRSTRLEN] = "";
  uint16_t port = 0;
  if (name.ss_family == AF_INET6) {
    const auto& v6 = reinterpret_cast<const sockaddr_in6&>(name);
    inet_ntop(AF_INET6, &v6.sin6_addr, host, sizeof host);
    port = ntohs(v6.sin6_port);
  } else {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(name);
    inet_ntop(AF_INET, &v4.sin_addr, host, sizeof host);
    port = ntohs(v4.sin_port);
  }
  return std::string(host) + " " + std::to_string(port);
}

fid_ep* OfiFabric::open(const std::string& address, void* context) {
  const auto [host, port] = host_and_port(address);
  fi_info* info = info_of(host, port, 0);
  fid_ep* endpoint = nullptr;
  try {
    endpoint = open(info, context);
  } catch (...) {
    library_.freeinfo(info);
    throw;
  }
  library_.freeinfo(info);
  return endpoint;
}

fid_ep* OfiFabric::open(fi_info* request, void* context) {
  fid_ep* endpoint = nullptr;
  check(fi_endpoint(domain_, request, &endpoint, context), "make an endpoint");
  try {
    check(fi_ep_bind(endpoint, &events_->fid, 0), "bind an endpoint");
    check(fi_ep_bind(endpoint, &completions_->fid, FI_TRANSMIT | FI_RECV), "bind an endpoint");
    check(fi_enable(endpoint), "enable an endpoint");
  } catch (...) {
    fi_close(&endpoint->fid);
    throw;
  }
  return endpoint;
}

void OfiFabric::connect(fid_ep* endpoint, const std::string& address) {
  const auto [host, port] = host_and_port(address);
  fi_info* info = info_of(host, port, 0);
  const int result = fi_connect(endpoint, info->dest_addr, nullptr, 0);
  library_.freeinfo(info);
  check(result, "connect");
}

void OfiFabric::reject(fi_info* request) { fi_reject(listener_, request->handle, nullptr, 0); }

bool OfiFabric::may_sleep() {
  fid* queues[] = {&completions_->fid, &events_->fid};
  return fi_trywait(fabric_, queues, 2) == FI_SUCCESS;
}

int OfiFabric::wait_fd(fid* queue) {
  int fd = -1;
  return fi_control(queue, FI_GETWAIT, &fd) == 0 ? fd : -1;
}

void OfiFabric::sleep(int at_most_ms, int bell_fd, bool for_queues) const {
  pollfd entries[] = {{bell_fd, POLLIN, 0},
                      {wait_fd(&completions_->fid), POLLIN, 0},
                      {wait_fd(&events_->fid), POLLIN, 0}};
  ::poll(entries, for_queues ? 3 : 1, at_most_ms);
  uint64_t rings = 0;
  [[maybe_unused]] const ssize_t bytes = read(bell_fd, &rings, sizeof rings);
}

}  // namespace jaxring
#endif
