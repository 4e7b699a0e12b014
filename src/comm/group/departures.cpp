#include "comm/group/departures.h"

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {

void Departures::add(int rank, int64_t calls) {
  left_.insert(rank);
  if (!first_ || calls < first_->calls) first_ = {rank, calls};
}

std::exception_ptr Departures::failure_of(const CallId& call_id) const {
  if (!first_ || call_id.message || call_id.number <= first_->calls) return nullptr;
  return std::make_exception_ptr(PeerError(
      text(describe_rank(group_, first_->rank), " has left group '", group_.name, "' after ", first_->calls,
           " calls, but this is call ", call_id.number,
           ": its program destroyed the group or exited. Make the same calls on all ranks; for uneven inputs use join"),
      std::nullopt, Culprit{group_.peers.at(first_->rank).rank, CulpritRole::kLeft}));
}

}  // namespace lockstep::detail
