#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/group/membership.h"
#include "comm/watch/flight_recorder.h"

namespace lockstep::detail {

/// The answer of one rank to a question about a call.
struct Answer {
  int rank_in_job = 0;
  std::optional<Fingerprint> call{};  // its call with that CallId, if it has reached it
  std::string site{};                 // call site of that call
  bool is_over = false;               // that call has ended
  std::string doing{};                // what the rank is doing now

  bool operator==(const Answer&) const = default;
};

/// Serializes the answer of this rank.
std::string answer(const FlightRecorder& recorder, const std::string& group, const std::string& call_id);
/// Parses the answers of all ranks that answered: rank, answer, rank, answer, ...
std::vector<Answer> read_answers(const std::vector<std::string>& fields);

/// Describes two calls that do not match, with their call sites; nullopt when all known calls match.
std::optional<std::string> find_mismatch(const Membership& group, const CallRecord& own,
                                         const std::vector<Answer>& answers);

/// The first rank, as rank in the job, that has not reached the call; nullopt when all have.
std::optional<int> first_straggler(const Membership& group, const CallId& call_id, const std::vector<Answer>& answers);
/// The only rank, as rank in the job, whose call differs from the calls of all others; nullopt when there is no such
/// rank, or fewer than two others are known.
std::optional<int> find_odd_rank(const Membership& group, const CallRecord& own, const std::vector<Answer>& answers);

/// Describes the ranks that have not reached the call: where they run and what they are doing.
std::string describe_stragglers(const Membership& group, const CallId& call_id, const std::vector<Answer>& answers);

/// Whether a lower rank is in the same call. Only the lowest rank prints warnings about a call.
bool lower_rank_also_waits(const Membership& group, const std::vector<Answer>& answers);

}  // namespace lockstep::detail
