#pragma once

#include <vector>

#include <lockstep/export.h>

namespace lockstep {

class ProcessGroup;

/// Arithmetic for groups of consecutive ranks, as ProcessGroup::new_subgroups creates them. In the examples below, this
/// rank is rank 4 of 6 ranks in groups of 3: it has position 1 in group 1, which begins at rank 3. A plain value. Not
/// collective.
class LOCKSTEP_EXPORT GroupLayout {
 public:
  /// Throw UsageError unless `group_size` divides the world size and the rank is less than the world size.
  GroupLayout(const ProcessGroup& world, int group_size);
  GroupLayout(int rank, int world_size, int group_size);

  int group_size() const { return group_size_; }
  int group_count() const { return world_size_ / group_size_; }
  /// Returns the index of this rank's group: 1.
  int group_rank() const { return rank_ / group_size_; }
  /// Returns the position of this rank in its group: 1.
  int local_group_rank() const { return rank_ % group_size_; }
  /// Returns the first rank of this rank's group: 3.
  int group_rank_base() const { return rank_ - local_group_rank(); }

  /// Returns the ranks of this rank's group: 3, 4, 5.
  std::vector<int> group() const;
  /// Returns the ranks with this rank's position, one of each group: 1, 4. For reductions across groups.
  std::vector<int> across() const;
  /// Returns all groups: {0, 1, 2}, {3, 4, 5}. For new_subgroups_by_enumeration.
  std::vector<std::vector<int>> groups() const;
  /// Returns, for each position, all ranks with that position: {0, 3}, {1, 4}, {2, 5}.
  std::vector<std::vector<int>> groups_across() const;

 private:
  int rank_;
  int world_size_;
  int group_size_;
};

}  // namespace lockstep
