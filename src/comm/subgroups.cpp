#include <algorithm>
#include <map>
#include <set>
#include <sstream>
#include <utility>

#include <lockstep/error.h>
#include <lockstep/group_layout.h>
#include <lockstep/process_group.h>

#include "base/text.h"
#include "comm/setup/backend_choice.h"
#include "comm/setup/make_group.h"

namespace lockstep {
namespace {

using detail::Group;
using detail::Operation;

// Sorts the ranks, like PyTorch: the order in which ranks are listed does not matter.
std::vector<int> checked_ranks(const detail::Membership& parent, std::vector<int> ranks) {
  auto fail = [&](const auto&... parts) {
    throw UsageError(parent.rank, text("new_group of '", parent.name, "': ", parts...));
  };
  if (ranks.empty()) fail("a group needs at least one rank");
  std::sort(ranks.begin(), ranks.end());
  if (auto twice = std::adjacent_find(ranks.begin(), ranks.end()); twice != ranks.end())
    fail("rank ", *twice, " is listed twice");
  for (int rank : ranks)
    if (rank < 0 || rank >= parent.size) fail("rank ", rank, " is out of range; the ranks are 0 to ", parent.size - 1);
  return ranks;
}

std::string list_groups(const std::vector<std::vector<int>>& groups) {
  std::ostringstream out;
  for (const auto& ranks : groups) {
    const char* before = " {";
    for (int rank : ranks) out << std::exchange(before, ", ") << rank;
    out << '}';
  }
  return out.str();
}

// All ranks of the parent call this with the same arguments, so their counters give the new groups the same names.
std::vector<std::shared_ptr<Group>> make_groups(Group& parent, const std::vector<std::vector<int>>& groups,
                                                Operation call, const NewGroupOptions& options) {
  const auto& membership = parent.membership();
  auto backend = options.backend.value_or(membership.backend_asked);
  auto timeout = options.timeout.value_or(membership.timeout);
  detail::parse_backends(backend);  // throws if it is invalid
  if (timeout <= std::chrono::milliseconds(0))
    throw UsageError(membership.rank,
                     text(name_of(call), ": the time-out is ", timeout.count(), " ms; it must be above 0"));
  std::string what = text("backend ", backend, ", time-out ", timeout.count(), " ms, ranks", list_groups(groups));
  auto barrier = [&] {  // a call of the parent; a short time-out of the new group must not break the parent
    parent.for_control().run(
        {{call, {}, {}, {}, {}, what}, [](Backend& backend, const CallInfo& info) { backend.barrier(info); }},
        {std::max(timeout, membership.timeout), options.site});
  };
  barrier();
  std::vector<std::string> names;  // reserved first: a group that fails must not change the names of later groups
  for (size_t i = 0; i < groups.size(); ++i) names.push_back(text(membership.name, '/', parent.next_child()));

  std::vector<std::shared_ptr<Group>> result;
  for (size_t i = 0; i < groups.size(); ++i) {
    std::vector<int> ranks_in_job;
    for (int rank : groups[i]) ranks_in_job.push_back(membership.peers[rank].rank);
    result.push_back(
        make_group(parent.job(), {names[i], std::move(ranks_in_job), backend, membership.device, timeout}));
  }
  barrier();  // no rank continues or exits while other ranks still create their groups
  return result;
}

/// The groups of one split, in the order of colors, each ordered by key and rank. Collective over the parent.
std::vector<std::vector<int>> groups_of_colors(const ProcessGroup& parent, int color, int key,
                                               const CallOptions& options) {
  const auto all = parent.all_gather(int64_t{color} << 32 | static_cast<uint32_t>(key), options);
  std::map<int64_t, std::vector<std::pair<int, int>>> members;  // color -> key and rank
  for (int rank = 0; rank < parent.size(); ++rank)
    if (all[rank] >= 0) members[all[rank] >> 32].emplace_back(static_cast<int>(all[rank]), rank);
  std::vector<std::vector<int>> groups;
  for (auto& [ignored, ranks] : members) {
    std::sort(ranks.begin(), ranks.end());
    groups.emplace_back();
    for (const auto& [ignored_key, rank] : ranks) groups.back().push_back(rank);
  }
  return groups;
}

ProcessGroup group_with_me(const std::vector<std::shared_ptr<Group>>& made) {
  for (const auto& group : made)
    if (group->membership().rank != detail::Membership::kNotAMember) return ProcessGroup(group);
  return ProcessGroup(made[0]);
}

}  // namespace

ProcessGroup ProcessGroup::new_group(std::vector<int> ranks, const NewGroupOptions& options) const {
  auto& parent = member();
  return ProcessGroup(
      make_groups(parent, {checked_ranks(parent.membership(), std::move(ranks))}, Operation::kNewGroup, options)[0]);
}

ProcessGroup ProcessGroup::new_subgroups(int group_size, const NewGroupOptions& options) const {
  auto& parent = member();
  GroupLayout layout(*this, group_size);
  return ProcessGroup(make_groups(parent, layout.groups(), Operation::kNewSubgroups, options)[layout.group_rank()]);
}

ProcessGroup ProcessGroup::new_subgroups_by_enumeration(const std::vector<std::vector<int>>& groups,
                                                        const NewGroupOptions& options) const {
  auto& parent = member();
  if (groups.empty()) throw UsageError(rank(), "new_subgroups_by_enumeration: the list of groups is empty");
  std::vector<std::vector<int>> checked;
  std::set<int> seen;
  for (const auto& group : groups) {
    checked.push_back(checked_ranks(parent.membership(), group));
    for (int member : group)
      if (!seen.insert(member).second)
        throw UsageError(rank(), text("new_subgroups_by_enumeration: rank ", member,
                                      " is in two groups; create overlapping groups with new_group, one by one"));
  }
  return group_with_me(make_groups(parent, checked, Operation::kNewSubgroupsByEnumeration, options));
}

ProcessGroup ProcessGroup::split_group(int color, int key, const NewGroupOptions& options) const {
  auto& parent = member();
  const auto groups = groups_of_colors(*this, color, key, {{}, options.site});
  if (groups.empty())
    throw UsageError(rank(),
                     "split_group: the colors of all ranks are negative; pass a color of 0 or more on some rank");
  return group_with_me(make_groups(parent, groups, Operation::kSplitGroup, options));
}

}  // namespace lockstep
