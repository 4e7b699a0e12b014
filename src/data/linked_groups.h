#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>

#include <lockstep/error.h>
#include <lockstep/group_loader.h>
#include <lockstep/process_group.h>

namespace lockstep::detail {

/// A failure of one rank, in the form in which all ranks of the groups throw it.
struct GroupFailure {
  ErrorKind kind = ErrorKind::kError;
  int rank = 0;  // in the job; the message begins with it
  std::string message{};
  std::optional<Culprit> culprit{};
  bool is_stale = false;          // the rank was in an earlier loop; in an agreed failure: all ranks were
  std::exception_ptr original{};  // on the failing rank only
};

/// A text that must be equal on all ranks of a group.
struct Compared {
  const char* what = "";  // "options"
  std::string in_broadcast{};
  std::string in_scatter{};
};

/// The groups of a GroupLoader. A group that scatters contains rank 0 of each group that broadcasts, so the ranks form
/// a tree of two levels. A failure on any of them reaches all: from the ranks of the groups that broadcast to their
/// rank 0, between the ranks of the group that scatters, and back.
class LinkedGroups {
 public:
  /// Collective. `rank` is the rank in errors if there are no groups.
  LinkedGroups(const ReadingGroups& groups, int rank);

  const std::optional<ProcessGroup>& scatter() const { return groups_.scatter; }
  const std::optional<ProcessGroup>& broadcast() const { return groups_.broadcast; }
  int rank() const { return rank_; }  // in the job
  /// Whether this rank reads for itself or for other ranks.
  bool reads() const;

  /// Describes an exception of this rank. `doing` says what the rank was doing; it may be empty.
  GroupFailure failure(const std::exception_ptr& error, const std::string& doing) const;
  GroupFailure failure(ErrorKind kind, int rank, const std::string& what) const;

  /// Returns whether `value` is true on any rank. Collective: one small call, or three with both kinds of groups.
  bool any(bool value) const;
  /// Returns the failure of the lowest rank that has one, or the first difference between the compared texts; none if
  /// no rank has failed and the texts are equal. Collective; returns the same on all ranks.
  std::optional<GroupFailure> agree(const std::optional<GroupFailure>& own_failure,
                                    const Compared& compared = {}) const;
  /// Throws a failure on which all ranks agree. Collective.
  [[noreturn]] void throw_on_all_ranks(const GroupFailure& failure) const;
  /// Calls agree(), then throw_on_all_ranks() if there is a failure.
  void require_none(const std::optional<GroupFailure>& own_failure, const Compared& compared = {}) const;

 private:
  std::optional<GroupFailure> first_in(const ProcessGroup& group, const std::optional<GroupFailure>& own_failure,
                                       const std::string& compared, const std::string& what) const;

  // Constant after construction.
  ReadingGroups groups_;           // the groups that contain this rank
  bool is_below_scatter_ = false;  // rank 0 of the group that broadcasts is in a group that scatters
  int rank_ = 0;
};

}  // namespace lockstep::detail
