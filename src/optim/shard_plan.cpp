#include "optim/shard_plan.h"

#include <algorithm>
#include <numeric>

#include "base/align.h"

namespace lockstep::detail {
namespace {

ShardPlan divide_elements(const std::vector<int64_t>& sizes, int ranks, int64_t alignment) {
  ShardPlan plan;
  int64_t end = 0;
  for (int64_t size : sizes) {
    plan.offsets.push_back(end);
    end += align_up(size, alignment);
  }
  const int64_t share = align_up((end + ranks - 1) / ranks, alignment);
  for (int rank = 0; rank <= ranks; ++rank) plan.begins.push_back(rank * share);
  return plan;
}

// Greedy: assigns the largest parameter first, each to the rank with the smallest load.
ShardPlan divide_parameters(const std::vector<int64_t>& sizes, int ranks, int64_t alignment) {
  std::vector<size_t> order(sizes.size());
  std::iota(order.begin(), order.end(), size_t(0));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<int> owners(sizes.size());
  std::vector<int64_t> load(ranks, 0);
  for (size_t parameter : order) {
    const auto least = std::min_element(load.begin(), load.end());
    owners[parameter] = static_cast<int>(least - load.begin());
    *least += align_up(sizes[parameter], alignment);
  }
  ShardPlan plan;
  plan.begins.push_back(0);
  std::vector<int64_t> next;
  for (int64_t elements : load) {
    next.push_back(plan.begins.back());
    plan.begins.push_back(plan.begins.back() + elements);
  }
  for (size_t parameter = 0; parameter < sizes.size(); ++parameter) {
    int64_t& offset = next[owners[parameter]];
    plan.offsets.push_back(offset);
    offset += align_up(sizes[parameter], alignment);
  }
  return plan;
}

}  // namespace

bool ShardPlan::is_even() const {
  for (size_t rank = 0; rank + 1 < begins.size(); ++rank)
    if (size_of(static_cast<int>(rank)) != size_of(0)) return false;
  return true;
}

ShardPlan plan_shards(const std::vector<int64_t>& sizes, int ranks, ShardBy by, int64_t alignment) {
  return by == ShardBy::kElements ? divide_elements(sizes, ranks, alignment)
                                  : divide_parameters(sizes, ranks, alignment);
}

std::vector<ShardPiece> pieces_of(const ShardPlan& plan, const std::vector<int64_t>& sizes, int rank) {
  std::vector<ShardPiece> pieces;
  for (size_t parameter = 0; parameter < sizes.size(); ++parameter) {
    const int64_t offset = plan.offsets[parameter];
    const int64_t begin = std::max(offset, plan.begins[rank]);
    const int64_t end = std::min(offset + sizes[parameter], plan.begins[rank + 1]);
    if (begin < end) pieces.push_back({parameter, begin - offset, end - begin});
  }
  return pieces;
}

}  // namespace lockstep::detail
