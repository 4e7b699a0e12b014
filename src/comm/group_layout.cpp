#include <lockstep/group_layout.h>

#include <lockstep/error.h>
#include <lockstep/process_group.h>

#include "base/text.h"

namespace lockstep {
namespace {

// `count` ranks starting at `first`, with distance `step`.
std::vector<int> ranks_from(int first, int step, int count) {
  std::vector<int> ranks;
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

}  // namespace

GroupLayout::GroupLayout(const ProcessGroup& world, int group_size)
    : GroupLayout(world.rank(), world.size(), group_size) {}

GroupLayout::GroupLayout(int rank, int world_size, int group_size)
    : rank_(rank), world_size_(world_size), group_size_(group_size) {
  if (world_size < 1 || rank < 0 || rank >= world_size)
    throw UsageError(text("GroupLayout: rank ", rank, " of ", world_size, "; ranks count from 0 to world size - 1"));
  if (group_size < 1 || world_size % group_size != 0)
    throw UsageError(rank, text("groups of ", group_size, " cannot be formed from ", world_size,
                                " ranks; the group size must divide the world size. For uneven groups use "
                                "new_subgroups_by_enumeration"));
}

std::vector<int> GroupLayout::group() const {
  return ranks_from(group_rank_base(), 1, group_size_);
}

std::vector<int> GroupLayout::across() const {
  return ranks_from(local_group_rank(), group_size_, group_count());
}

std::vector<std::vector<int>> GroupLayout::groups() const {
  std::vector<std::vector<int>> result;
  for (int g = 0; g < group_count(); ++g) result.push_back(ranks_from(g * group_size_, 1, group_size_));
  return result;
}

std::vector<std::vector<int>> GroupLayout::groups_across() const {
  std::vector<std::vector<int>> result;
  for (int place = 0; place < group_size_; ++place) result.push_back(ranks_from(place, group_size_, group_count()));
  return result;
}

}  // namespace lockstep
