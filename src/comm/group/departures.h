#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <set>

#include "comm/group/membership.h"
#include "comm/watch/fingerprint.h"

namespace lockstep::detail {

/// The ranks that have left a group in order: they destroyed it or exited. Collectives after the last collective of
/// such a rank cannot succeed. Not thread-safe.
class Departures {
 public:
  /// `group` must outlive the object.
  explicit Departures(const Membership& group) : group_(group) {}

  /// The rank has left after this number of collectives.
  void add(int rank, int64_t calls);
  bool any() const { return first_.has_value(); }
  /// Whether this rank is the only one that has not left.
  bool all_others_left() const { return static_cast<int>(left_.size()) == group_.size - 1; }

  /// Why a collective cannot succeed, if a rank has left before it; else null. Messages may have been sent before.
  std::exception_ptr failure_of(const CallId& call_id) const;

 private:
  struct Departure {
    int rank;
    int64_t calls;
  };

  const Membership& group_;
  std::set<int> left_;
  std::optional<Departure> first_;  // the departure with the fewest calls
};

}  // namespace lockstep::detail
