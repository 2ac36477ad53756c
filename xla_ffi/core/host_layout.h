// Which ranks share a host: all that a schedule of two levels knows of the machines.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace jaxring {

struct HostLayout {
  std::vector<int> host_of;             // by rank; hosts are numbered in order of their first rank
  std::vector<std::vector<int>> ranks;  // by host, ascending
  // How many ranks of each host take a share of what crosses between hosts: as many as the host
  // with the fewest has.
  int lanes = 1;

  // `hosts`: by rank, any numbers.
  explicit HostLayout(const std::vector<int>& hosts) {
    std::map<int, int> numbers;
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      const int host = numbers.emplace(hosts[rank], static_cast<int>(numbers.size())).first->second;
      host_of.push_back(host);
      if (host == host_count()) ranks.emplace_back();
      ranks[host].push_back(static_cast<int>(rank));
    }
    size_t fewest = hosts.size();
    for (const auto& of_host : ranks) fewest = std::min(fewest, of_host.size());
    lanes = static_cast<int>(fewest);
  }

  int host_count() const { return static_cast<int>(ranks.size()); }
  bool shares_hosts() const { return ranks.size() < host_of.size(); }  // some ranks do
  int index_on_host(int rank) const {
    const auto& mates = ranks[host_of[rank]];
    return static_cast<int>(std::lower_bound(mates.begin(), mates.end(), rank) - mates.begin());
  }
};

}  // namespace jaxring
