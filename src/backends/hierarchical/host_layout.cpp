#include "backends/hierarchical/host_layout.h"

#include <algorithm>

namespace lockstep::hierarchical {

HostLayout::HostLayout(const std::vector<std::string>& host_of_rank) {
  std::vector<std::string> names;
  for (const auto& name : host_of_rank) {
    auto known = std::find(names.begin(), names.end(), name);
    auto host = static_cast<int>(known - names.begin());
    if (known == names.end()) {
      names.push_back(name);
      members_.emplace_back();
    }
    members_[host].push_back(static_cast<int>(places_.size()));
    places_.push_back({host, static_cast<int>(members_[host].size()) - 1});
  }
  auto [fewest, most] = std::minmax_element(members_.begin(), members_.end(),
                                            [](const auto& a, const auto& b) { return a.size() < b.size(); });
  columns_ = static_cast<int>(fewest->size());
  is_even_ = fewest->size() == most->size();
}

}  // namespace lockstep::hierarchical
