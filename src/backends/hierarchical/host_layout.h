#pragma once

#include <string>
#include <vector>

namespace lockstep::hierarchical {

/// Which ranks of a group share a host. Hosts are numbered in the order of their first ranks, and the ranks of a host
/// in their own order.
class HostLayout {
 public:
  /// The host of each rank, as anything that tells hosts apart.
  explicit HostLayout(const std::vector<std::string>& host_of_rank);

  int ranks() const { return static_cast<int>(places_.size()); }
  int hosts() const { return static_cast<int>(members_.size()); }
  int host_of(int rank) const { return places_[rank].host; }
  /// Its number among the ranks of its host.
  int local_index_of(int rank) const { return places_[rank].index; }
  const std::vector<int>& ranks_of(int host) const { return members_[host]; }

  /// How many ranks every host has at least: so many columns of one rank from each host there are.
  int columns() const { return columns_; }
  /// Whether all hosts have as many ranks.
  bool is_even() const { return is_even_; }

 private:
  struct Position {
    int host = 0;
    int index = 0;
  };

  // Constant after construction.
  std::vector<Position> places_;
  std::vector<std::vector<int>> members_;
  int columns_ = 0;
  bool is_even_ = true;
};

}  // namespace lockstep::hierarchical
