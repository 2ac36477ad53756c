#include "xla_ffi/cuda_ffi/card.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <map>

#include "xla_ffi/core/operation.h"

namespace jaxring::cuda {
namespace {

bool maps(const std::vector<uint64_t>& mapped, int rank, int peer) {
  return (mapped[rank] >> peer & 1) != 0;
}

// The ranks of each host, hosts in the order of their first rank.
std::vector<std::vector<int>> by_host(const std::vector<Card>& cards) {
  std::vector<std::vector<int>> hosts;
  std::map<uint64_t, size_t> index_of;
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    const auto [found, is_new] = index_of.emplace(cards[rank].host, hosts.size());
    if (is_new) hosts.emplace_back();
    hosts[found->second].push_back(static_cast<int>(rank));
  }
  return hosts;
}

}  // namespace

std::string describe(const Card& card) {
  return "rank " + std::to_string(card.rank) + " (pid " + std::to_string(card.pid) + " on host " +
         card.host_name + ", GPU " + std::to_string(card.device) + ")";
}

Plan plan_for(int rank, const std::vector<Card>& cards, const std::vector<uint64_t>& mapped) {
  const std::vector<std::vector<int>> hosts = by_host(cards);
  Plan plan;
  plan.reach = Reach::kMapped;
  bool mapped_in_hosts = true;
  for (size_t a = 0; a < cards.size(); ++a) {
    for (size_t b = 0; b < cards.size(); ++b) {
      if (maps(mapped, static_cast<int>(a), static_cast<int>(b))) continue;
      if (plan.reason.empty()) {
        plan.reason = describe(cards[a]) + " cannot map the memory of " + describe(cards[b]);
      }
      plan.reach = Reach::kNccl;
      mapped_in_hosts = mapped_in_hosts && cards[a].host != cards[b].host;
    }
  }
  const size_t per_host = hosts.front().size();
  const bool even = std::all_of(hosts.begin(), hosts.end(),
                                [&](const auto& ranks) { return ranks.size() == per_host; });
  if (plan.reach == Reach::kNccl && mapped_in_hosts && hosts.size() > 1 && even && per_host > 1) {
    plan.reach = Reach::kHosts;
  }
  for (size_t host = 0; host < hosts.size(); ++host) {
    const auto found = std::find(hosts[host].begin(), hosts[host].end(), rank);
    if (found == hosts[host].end()) continue;
    plan.host_ranks = hosts[host];
    plan.place_in_host = static_cast<int>(found - hosts[host].begin());
    plan.host_index = static_cast<int>(host);
  }
  return plan;
}

uint64_t host_identity() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  for (const char* space : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    struct stat found{};
    if (stat(space, &found) == 0) text += "/" + std::to_string(found.st_ino);
  }
  return hash_of(text);
}

}  // namespace jaxring::cuda
