#pragma once

#include <optional>
#include <string>
#include <vector>

#include "comm/group/membership.h"
#include "comm/watch/flight_recorder.h"

namespace lockstep::detail {

/// What a rank says when it is asked about a call.
struct Answer {
  int rank_in_job = 0;
  std::optional<Fingerprint> call{};  // its own call of that call_id, if it has made it
  std::string site{};                 // and where
  bool is_over = false;               // and whether it has ended
  std::string doing{};                // what it does now

  bool operator==(const Answer&) const = default;
};

/// What the recorder knows, as it travels.
std::string answer(const FlightRecorder& recorder, const std::string& group, const std::string& call_id);
/// Answers of all ranks that gave one: rank, answer, rank, answer...
std::vector<Answer> read_answers(const std::vector<std::string>& fields);

/// The two calls that do not fit together, named with their sites; none when all that are known do.
std::optional<std::string> find_mismatch(const Membership& group, const CallRecord& mine,
                                         const std::vector<Answer>& answers);

/// The first rank, in the job, that has not come to the call; none when all have.
std::optional<int> first_straggler(const Membership& group, const CallId& call_id, const std::vector<Answer>& answers);
/// The rank in the job whose call is unlike that of all others, which are two at least; none when there is no such.
std::optional<int> find_odd_rank(const Membership& group, const CallRecord& mine, const std::vector<Answer>& answers);

/// Which ranks have not come to the call, where they run and what they do instead.
std::string describe_stragglers(const Membership& group, const CallId& call_id, const std::vector<Answer>& answers);

/// Whether a lower rank is in the same call: then it prints what there is to print about the call.
bool lower_rank_also_waits(const Membership& group, const std::vector<Answer>& answers);

}  // namespace lockstep::detail
