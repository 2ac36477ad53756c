#include "xla_ffi/cuda_ffi/multicast.h"

#include <cstring>

namespace jaxring::cuda {
namespace {

// What all ranks conclude alike from their cards; "" if nothing stands against it.
std::string reason_against(const std::vector<Card>& cards) {
  if (cards.size() < 3) return "two ranks read each other's memory as fast";
  for (size_t a = 0; a < cards.size(); ++a) {
    if (cards[a].host != cards[0].host || cards[a].pid != cards[0].pid) {
      return "the ranks are of several processes";
    }
    for (size_t b = 0; b < a; ++b) {
      if (cards[a].device == cards[b].device) return "two ranks share a GPU";
    }
  }
  return "";
}

struct Offer {
  uint64_t object;
  int64_t bytes;
};

}  // namespace

Failure multicast_unsupported(int device) {
  bool yes = false;
  if (Failure failure = backend().multicast->supported(device, &yes)) return failure;
  if (yes) return std::nullopt;
  return "GPU " + std::to_string(device) + " has no multicast (sm_90 and newer, over NVSwitch, do)";
}

// All say how it went, so that none goes on alone: the driver lets a bind wait for a missing
// device.
bool Multicast::agreed(const Failure& failure, const Gather& gather) {
  for (const std::string& text : gather(failure ? "-" + *failure : "+")) {
    if (text.empty() || text[0] == '+') continue;
    why_not_ = text.substr(1, std::strlen(text.c_str()) - 1);
    return false;
  }
  return true;
}

void Multicast::set_up(const std::vector<Card>& cards, int rank, const Gather& gather) {
  why_not_ = backend().multicast == nullptr ? "this build has none" : reason_against(cards);
  if (!why_not_.empty()) return;
  const MulticastApi& api = *backend().multicast;
  const int device = cards[rank].device;
  if (!agreed(multicast_unsupported(device), gather)) return;
  Offer offer{0, backend().kernels->window_bytes()};
  Failure failure;
  if (rank == 0) {
    failure = api.create(static_cast<int>(cards.size()), &offer.bytes, &offer.object);
    owns_object_ = !failure;
    object_ = offer.object;
  }
  if (!agreed(failure, gather)) return release();
  // One process: the handle is good as it is.
  const std::string offered =
      gather(std::string(reinterpret_cast<const char*>(&offer), sizeof offer))[0];
  std::memcpy(&offer, offered.data(), sizeof offer);
  if (!agreed(api.add(offer.object, device), gather)) return release();
  if (!agreed(api.bind(offer.object, device, offer.bytes, &window_), gather)) return release();
}

void Multicast::release() {
  if (window_.memory != 0) backend().multicast->unbind(window_);
  if (owns_object_) backend().multicast->release(object_);
  window_ = {};
  owns_object_ = false;
}

}  // namespace jaxring::cuda
