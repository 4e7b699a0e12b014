#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::hierarchical {

/// Which ranks of a group share a host. Hosts are numbered in the order of their first ranks. The ranks of a host are
/// numbered in rank order.
class HostLayout {
 public:
  /// Takes a string for each rank that identifies its host.
  explicit HostLayout(const std::vector<std::string>& host_of_rank);

  int ranks() const { return static_cast<int>(places_.size()); }
  int hosts() const { return static_cast<int>(members_.size()); }
  int host_of(int rank) const { return places_[rank].host; }
  /// The number of the rank among the ranks of its host.
  int local_index_of(int rank) const { return places_[rank].index; }
  const std::vector<int>& ranks_of(int host) const { return members_[host]; }

  /// The number of ranks on the smallest host. Column i consists of the rank with local index i on each host.
  int columns() const { return columns_; }
  /// Whether all hosts have the same number of ranks.
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

/// A tensor cut into equal parts, one for each column, and a rest of fewer elements than columns, which every column
/// handles.
class Columns {
 public:
  Columns(const at::Tensor& data, int columns)
      : flat_(data.view({-1})), columns_(columns), each_(flat_.numel() / columns) {}

  int count() const { return columns_; }
  bool has_parts() const { return each_ > 0; }
  at::Tensor all_parts() const { return flat_.narrow(0, 0, each_ * columns_); }
  at::Tensor part(int column) const { return flat_.narrow(0, each_ * column, each_); }
  bool has_rest() const { return flat_.numel() > each_ * columns_; }
  at::Tensor rest() const { return flat_.narrow(0, each_ * columns_, flat_.numel() - each_ * columns_); }

  /// The tensors that the ranks of a column exchange between hosts.
  std::vector<at::Tensor> parts_of(int column) const {
    std::vector<at::Tensor> result;
    if (has_parts()) result.push_back(part(column));
    if (has_rest()) result.push_back(rest());
    return result;
  }

 private:
  at::Tensor flat_;
  int columns_;
  int64_t each_;
};

/// Cuts a tensor into segments of about `segment_bytes`. Only the last segment may be shorter or have a rest.
inline std::vector<Columns> cut_into_segments(const at::Tensor& data, int columns, int64_t segment_bytes) {
  const auto flat = data.view({-1});
  const int64_t each = std::max<int64_t>(1, segment_bytes / static_cast<int64_t>(data.element_size()) / columns);
  const int64_t step = each * columns;
  std::vector<Columns> result;
  for (int64_t begin = 0; begin < flat.numel(); begin += step)
    result.emplace_back(flat.narrow(0, begin, std::min(step, flat.numel() - begin)), columns);
  return result;
}

}  // namespace lockstep::hierarchical
