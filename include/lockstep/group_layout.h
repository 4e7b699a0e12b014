#pragma once

#include <vector>

#include <lockstep/export.h>

namespace lockstep {

class ProcessGroup;

/// Ranks in consecutive groups of one size, as ProcessGroup::new_subgroups makes them: of 6 ranks in groups of 3, rank
/// 4 is in group 1 of 2, which begins at rank 3, and is number 1 in it. A plain value; not collective.
class LOCKSTEP_EXPORT GroupLayout {
 public:
  /// UsageError unless the group size divides the world size and the rank lies in it.
  GroupLayout(const ProcessGroup& world, int group_size);
  GroupLayout(int rank, int world_size, int group_size);

  int group_size() const { return group_size_; }
  int group_count() const { return world_size_ / group_size_; }
  /// Which group this rank is in.
  int group_rank() const { return rank_ / group_size_; }
  /// Which place it has there.
  int local_group_rank() const { return rank_ % group_size_; }
  /// The rank at which its group begins.
  int group_rank_base() const { return rank_ - local_group_rank(); }

  /// The ranks of this rank's group: 3, 4, 5.
  std::vector<int> group() const;
  /// The ranks that have this rank's place in their groups, one of each: 1, 4. For reductions across groups.
  std::vector<int> across() const;
  /// All groups: {0, 1, 2}, {3, 4, 5}. For new_subgroups_by_enumeration.
  std::vector<std::vector<int>> groups() const;
  /// All ranks of one place, for each place: {0, 3}, {1, 4}, {2, 5}.
  std::vector<std::vector<int>> groups_across() const;

 private:
  int rank_;
  int world_size_;
  int group_size_;
};

}  // namespace lockstep
