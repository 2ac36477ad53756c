// Who connects and who goes: what OfiLinks does with the events of its fabric. Under its mutex.
#if JAXRING_HAS_LIBFABRIC
#include <algorithm>

#include "xla_ffi/transport/ofi_links.h"

namespace jaxring {
namespace {

constexpr int kMostStrangers = 64;  // that have connected and not yet proved anything
constexpr auto kStrangerPatience = std::chrono::seconds(10);

}  // namespace

bool OfiLinks::read_events() {
  bool any = false;
  for (;;) {
    uint32_t event = 0;
    union {
      fi_eq_cm_entry entry;
      char room[1024];  // for what a stranger may add to its request
    } read{};
    const ssize_t bytes = fi_eq_read(fabric_.events(), &event, &read, sizeof read, 0);
    if (bytes == -FI_EAVAIL) {
      read_failed_event();
      any = true;
      continue;
    }
    if (bytes < 0) return any;
    any = true;
    if (event == FI_CONNREQ) {
      accept(read.entry.info);
      continue;
    }
    auto* link = static_cast<OfiLink*>(read.entry.fid->context);
    guarded(link, [&] {
      if (event == FI_CONNECTED) link->connected();
      if (event == FI_SHUTDOWN) link->closed();
    });
  }
}

void OfiLinks::read_failed_event() {
  fi_eq_err_entry error{};
  if (fi_eq_readerr(fabric_.events(), &error, 0) <= 0) return;
  if (error.fid != nullptr && error.fid->fclass == FI_CLASS_EP && error.fid->context != nullptr) {
    static_cast<OfiLink*>(error.fid->context)->closed();
  }
}

void OfiLinks::accept(fi_info* request) {
  const std::unique_ptr<fi_info, void (*)(fi_info*)> owned(request, &OfiFabric::free);
  if (strangers_ >= kMostStrangers) return fabric_.reject(request);
  try {
    auto link = std::make_unique<OfiLink>(home_, -1);
    link->opened(fabric_.open(request, link.get()));
    if (fi_accept(link->endpoint(), nullptr, 0) != 0) link->closed();
    links_.push_back(std::move(link));
    ++strangers_;
  } catch (const std::exception&) {  // out of files or memory: who needs it will try again
    fabric_.reject(request);
  }
}

bool OfiLinks::is_known(const OfiLink& link) const {
  return link.pid() != 0 || (!link.is_stranger() && link_to(link.process()) == &link);
}

// Those who have not proved anything in time, or something wrong.
void OfiLinks::drop_strangers() {
  dropped_.clear();                 // a round ago; their last completions have been read since
  dropped_.reserve(links_.size());  // so that nothing below throws half-way
  strangers_ = 0;
  for (auto& link : links_) {
    if (is_known(*link)) continue;
    const bool late = Clock::now() - link->begun() > kStrangerPatience;
    if (late || link->state() == OfiLink::kClosed) {
      link->hang_up();
      dropped_.push_back(std::move(link));
    } else {
      ++strangers_;
    }
  }
  links_.erase(std::remove(links_.begin(), links_.end(), nullptr), links_.end());
}

}  // namespace jaxring
#endif
