#pragma once

#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/error.h>

#include "comm/group/membership.h"
#include "comm/watch/flight_recorder.h"
#include "comm/watch/job.h"

namespace lockstep::detail {

/// Finds out why a call of this rank has failed with `error`: asks the other ranks for their calls if the answers may
/// show the cause, and reports the cause. Returns that cause, or the cause that another rank has reported before.
std::exception_ptr diagnose(const Membership& me, Job& job, const CallRecord& record, std::chrono::milliseconds timeout,
                            const std::exception_ptr& error);

/// Ranks make different calls; nullopt if all known calls match.
std::optional<Failure> mismatch_failure(const Membership& me, const CallRecord& record,
                                        const std::vector<Answer>& answers);
/// The call did not finish in time. Blames the first rank that has not reached it.
Failure timeout_failure(const Membership& me, const CallRecord& record, std::chrono::milliseconds timeout,
                        const std::vector<Answer>& answers);
/// Any failure that this rank has found; its message begins with this rank.
Failure own_failure(const Membership& me, ErrorKind kind, const std::string& message);

}  // namespace lockstep::detail
