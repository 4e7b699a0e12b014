#include "optim/zero/shard_plan.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "base/align.h"

namespace lockstep::detail {
namespace {

/// Whether the parameters, in the order of their offsets, lie side by side: without overlap and without large gaps.
bool is_block(const std::vector<ParameterRange>& sorted) {
  int64_t gaps = 0, elements = 0;
  for (size_t i = 0; i < sorted.size(); ++i) {
    elements += sorted[i].size;
    if (i == 0) continue;
    const int64_t gap = sorted[i].offset - (sorted[i - 1].offset + sorted[i - 1].size);
    if (gap < 0) return false;
    gaps += gap;
  }
  return 8 * gaps <= elements;
}

ShardPlan divide_elements(const std::vector<ParameterRange>& parameters, int ranks, int64_t alignment) {
  std::map<int64_t, std::vector<ParameterRange>> storages;
  for (const auto& parameter : parameters) storages[parameter.storage].push_back(parameter);
  for (auto& [storage, members] : storages) {
    std::stable_sort(members.begin(), members.end(), [](const auto& a, const auto& b) { return a.offset < b.offset; });
    if (!is_block(members)) members.clear();
  }
  ShardPlan plan;
  std::map<int64_t, int64_t> begins;  // of the blocks that are placed, by storage
  int64_t end = 0;
  for (const auto& [storage, offset, size] : parameters) {
    const auto& block = storages[storage];
    if (block.empty()) {
      plan.offsets.push_back(end);
      end += align_up(size, alignment);
      continue;
    }
    if (begins.emplace(storage, end).second)
      end += align_up(block.back().offset + block.back().size - block.front().offset, alignment);
    plan.offsets.push_back(begins[storage] + offset - block.front().offset);
  }
  const int64_t share = align_up((end + ranks - 1) / ranks, alignment);
  for (int rank = 0; rank <= ranks; ++rank) plan.begins.push_back(rank * share);
  return plan;
}

// Greedy: assigns the largest parameter first, each to the rank with the smallest load.
ShardPlan divide_parameters(const std::vector<ParameterRange>& parameters, int ranks, int64_t alignment) {
  std::vector<int64_t> sizes;
  for (const auto& parameter : parameters) sizes.push_back(parameter.size);
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

ShardPlan plan_shards(const std::vector<ParameterRange>& parameters, int ranks, ShardBy by, int64_t alignment) {
  return by == ShardBy::kElements ? divide_elements(parameters, ranks, alignment)
                                  : divide_parameters(parameters, ranks, alignment);
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
