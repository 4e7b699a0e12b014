#include "data/linked_groups.h"

#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

std::optional<ProcessGroup> if_member(const std::optional<ProcessGroup>& group) {
  return group && group->contains_me() ? group : std::nullopt;
}

int job_rank(const ReadingGroups& groups, int otherwise) {
  for (const auto& group : {groups.scatter, groups.broadcast})
    if (group) return group->global_rank(group->rank());
  return otherwise;
}

constexpr int64_t kNone = -1;

c10::IValue to_object(const std::optional<GroupFailure>& failure, const std::string& compared) {
  const auto given = failure.value_or(GroupFailure());
  const bool blames = given.culprit.has_value();
  return c10::ivalue::Tuple::create(
      std::vector<c10::IValue>{failure ? static_cast<int64_t>(given.kind) : kNone, int64_t{given.rank}, given.message,
                               blames ? int64_t{given.culprit->rank} : kNone,
                               blames ? static_cast<int64_t>(given.culprit->role) : kNone, given.is_stale, compared});
}

std::optional<GroupFailure> failure_in(const c10::IValue& object) {
  const auto& parts = object.toTupleRef().elements();
  if (parts[0].toInt() == kNone) return std::nullopt;
  GroupFailure failure{.kind = static_cast<ErrorKind>(parts[0].toInt()),
                       .rank = static_cast<int>(parts[1].toInt()),
                       .message = parts[2].toStringRef(),
                       .is_stale = parts[5].toBool()};
  if (parts[3].toInt() != kNone)
    failure.culprit = Culprit{static_cast<int>(parts[3].toInt()), static_cast<CulpritRole>(parts[4].toInt())};
  return failure;
}

const std::string& compared_in(const c10::IValue& object) {
  return object.toTupleRef().elements()[6].toStringRef();
}

// On the failing rank, an exception that is not lockstep's stays nested, as in a DataLoader's error.
[[noreturn]] void throw_failure(const GroupFailure& failure) {
  if (!failure.original || failure.kind != ErrorKind::kError)
    throw_error(failure.kind, failure.message, failure.rank, failure.culprit);
  try {
    std::rethrow_exception(failure.original);
  } catch (...) {
    std::throw_with_nested(Error(failure.message, failure.rank, failure.culprit));
  }
}

}  // namespace

LinkedGroups::LinkedGroups(const ReadingGroups& groups, int rank)
    : groups_{if_member(groups.scatter), if_member(groups.broadcast)}, rank_(job_rank(groups_, rank)) {
  if (broadcast()) is_below_scatter_ = broadcast()->broadcast(scatter() ? 1 : 0, 0) == 1;
}

bool LinkedGroups::reads() const {
  return scatter() ? scatter()->rank() == 0 : !broadcast() || broadcast()->rank() == 0;
}

GroupFailure LinkedGroups::failure(const std::exception_ptr& error, const std::string& doing) const {
  auto described =
      failure(kind_of(error), rank_, text(doing, doing.empty() ? "" : ": ", without_rank(message_of(error), rank_)));
  described.culprit = culprit_of(error).value_or(Culprit{rank_, CulpritRole::kGaveUp});
  described.original = error;
  return described;
}

GroupFailure LinkedGroups::failure(ErrorKind kind, int rank, const std::string& what) const {
  return {.kind = kind, .rank = rank, .message = text("rank ", rank, ": GroupLoader: ", what)};
}

bool LinkedGroups::any(bool value) const {
  const auto flag = at::full({1}, value ? 1 : 0, at::kLong);
  if (broadcast() && is_below_scatter_)
    broadcast()->reduce(flag, 0, ReduceOp::kMax);
  else if (broadcast())
    broadcast()->all_reduce(flag, ReduceOp::kMax);
  if (scatter()) scatter()->all_reduce(flag, ReduceOp::kMax);
  if (broadcast() && is_below_scatter_) broadcast()->broadcast(flag, 0);
  return *flag.data_ptr<int64_t>() != 0;
}

std::optional<GroupFailure> LinkedGroups::first_in(const ProcessGroup& group,
                                                   const std::optional<GroupFailure>& own_failure,
                                                   const std::string& compared, const std::string& what) const {
  const auto all = group.all_gather_object(to_object(own_failure, compared));
  std::optional<GroupFailure> first;
  bool all_are_stale = true;
  for (const auto& each : all) {
    const auto failure = failure_in(each);
    if (failure && (!first || failure->rank < first->rank)) first = failure;
    all_are_stale = all_are_stale && failure && failure->is_stale;
  }
  if (first) first->is_stale = all_are_stale;
  for (size_t i = 1; i < all.size() && !first; ++i) {
    const int other = group.global_rank(static_cast<int>(i));
    if (compared_in(all[i]) != compared_in(all[0]))
      first = failure(ErrorKind::kMismatch, other,
                      text("the ", what, " differ: rank ", group.global_rank(0), " has ", compared_in(all[0]),
                           "; rank ", other, " has ", compared_in(all[i]), "; use the same on all ranks"));
  }
  return first;
}

std::optional<GroupFailure> LinkedGroups::agree(const std::optional<GroupFailure>& own_failure,
                                                const Compared& compared) const {
  const auto ranks_that = [&](const char* verb) {
    return text(compared.what, " of the ranks of the group that ", verb);
  };
  auto agreed = own_failure;
  try {
    if (broadcast()) agreed = first_in(*broadcast(), agreed, compared.in_broadcast, ranks_that("broadcasts"));
    if (scatter()) agreed = first_in(*scatter(), agreed, compared.in_scatter, ranks_that("scatters"));
    if (broadcast() && is_below_scatter_) agreed = failure_in(broadcast()->broadcast_object(to_object(agreed, ""), 0));
  } catch (const Error&) {
    if (own_failure) throw_failure(*own_failure);  // more specific than the error of the broken group
    throw;
  }
  if (agreed && own_failure && agreed->rank == rank_) agreed->original = own_failure->original;
  return agreed;
}

// A rank that left earlier would abort the collective in which other ranks receive the failure, hence the barrier.
void LinkedGroups::throw_on_all_ranks(const GroupFailure& failure) const {
  for (const auto& group : {broadcast(), scatter()}) {
    try {
      if (group) group->barrier();
    } catch (const Error&) {
      // Ignored: `failure` is the root cause.
    }
  }
  throw_failure(failure);
}

void LinkedGroups::require_none(const std::optional<GroupFailure>& own_failure, const Compared& compared) const {
  if (const auto agreed = agree(own_failure, compared)) throw_on_all_ranks(*agreed);
}

}  // namespace lockstep::detail
