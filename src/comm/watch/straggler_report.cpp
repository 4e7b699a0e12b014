#include "comm/watch/straggler_report.h"

#include <algorithm>
#include <map>

#include "base/text.h"
#include "rendezvous/store/protocol.h"

namespace lockstep::detail {
namespace {

/// Two ranks take part in a message, all ranks in any other call.
bool takes_part(const CallId& call_id, int rank) {
  return !call_id.message || rank == call_id.message->from || rank == call_id.message->to;
}

}  // namespace

std::string answer(const FlightRecorder& recorder, const std::string& group, const std::string& call_id) {
  auto record = recorder.find(group, call_id);
  if (!record) return pack({"", "", "", recorder.doing()});
  bool is_over = record->state == CallRecord::State::kDone || record->state == CallRecord::State::kFailed;
  return pack({write(record->call), describe(record->site), is_over ? "over" : "", recorder.doing()});
}

std::vector<Answer> read_answers(const std::vector<std::string>& fields) {
  std::vector<Answer> answers;
  for (size_t i = 0; i + 1 < fields.size(); i += 2) {
    Answer answer{static_cast<int>(to_number(fields[i]))};
    auto parts = unpack(fields[i + 1]);
    if (parts.size() != 4) continue;  // the rank has just joined or is about to leave
    if (!parts[0].empty()) answer.call = read_fingerprint(parts[0]);
    answer.site = parts[1];
    answer.is_over = parts[2] == "over";
    answer.doing = parts[3];
    answers.push_back(std::move(answer));
  }
  return answers;
}

std::optional<std::string> find_mismatch(const Membership& group, const CallRecord& own,
                                         const std::vector<Answer>& answers) {
  struct Known {
    int rank;
    const Fingerprint* call;
    std::string site;
  };
  std::vector<Known> known{{group.rank, &own.call, describe(own.site)}};
  for (const auto& answer : answers) {
    int rank = rank_in_group(group, answer.rank_in_job);
    if (rank != Membership::kNotAMember && rank != group.rank && answer.call)
      known.push_back({rank, &*answer.call, answer.site});
  }
  // Comparing all calls with this rank's call is enough, unless the call has sizes per pair of ranks: then all pairs of
  // calls are compared.
  bool is_between_two = !own.call.sends.empty() || !own.call.receives.empty();
  for (size_t a = 0; a < (is_between_two ? known.size() : 1); ++a)
    for (size_t b = a + 1; b < known.size(); ++b) {
      auto what = difference(*known[a].call, known[a].rank, *known[b].call, known[b].rank);
      if (!what) continue;
      return text("as ", describe(own.call_id), " of group '", group.name, "', ", describe_rank(group, known[a].rank),
                  " makes ", describe(*known[a].call), " at ", known[a].site, ", but ",
                  describe_rank(group, known[b].rank), " makes ", describe(*known[b].call), " at ", known[b].site, ": ",
                  *what, " differs. Make the same calls in the same order on all ranks");
    }
  return std::nullopt;
}

std::optional<int> find_odd_rank(const Membership& group, const CallRecord& own, const std::vector<Answer>& answers) {
  // Sizes per pair of ranks do not show which rank is wrong.
  if (!own.call.sends.empty() || !own.call.receives.empty()) return std::nullopt;
  std::map<int, const Fingerprint*> calls{{group.rank, &own.call}};
  for (const auto& answer : answers)
    if (int rank = rank_in_group(group, answer.rank_in_job); rank != Membership::kNotAMember && answer.call)
      calls.emplace(rank, &*answer.call);
  std::optional<int> odd;
  for (const auto& [rank, call] : calls) {
    const auto unlike = std::count_if(calls.begin(), calls.end(), [&, r = rank, c = call](const auto& other) {
      return other.first != r && difference(*c, r, *other.second, other.first);
    });
    if (unlike < 2 || static_cast<size_t>(unlike) + 1 < calls.size()) continue;
    if (odd) return std::nullopt;  // several ranks differ from all others
    odd = group.peers[static_cast<size_t>(rank)].rank;
  }
  return odd;
}

std::optional<int> first_straggler(const Membership& group, const CallId& call_id, const std::vector<Answer>& answers) {
  for (int rank = 0; rank < group.size; ++rank) {
    const int in_job = group.peers[static_cast<size_t>(rank)].rank;
    auto found = std::find_if(answers.begin(), answers.end(), [&](const Answer& a) { return a.rank_in_job == in_job; });
    if (takes_part(call_id, rank) && (found == answers.end() || !found->call)) return in_job;
  }
  return std::nullopt;
}

std::string describe_stragglers(const Membership& group, const CallId& call_id, const std::vector<Answer>& answers) {
  std::vector<std::string> late;
  for (int rank = 0; rank < group.size; ++rank) {
    if (!takes_part(call_id, rank)) continue;
    auto found = std::find_if(answers.begin(), answers.end(),
                              [&](const Answer& a) { return a.rank_in_job == group.peers[rank].rank; });
    if (found == answers.end())
      late.push_back(text(describe_rank(group, rank), ", which does not answer"));
    else if (!found->call)
      late.push_back(text(describe_rank(group, rank), ", which is ", found->doing));
  }
  if (late.empty())
    return text(call_id.message ? "Both" : "All", " ranks have reached this call: the call or the network is slow");
  return "Late: " + enumerate(late);
}

bool lower_rank_also_waits(const Membership& group, const std::vector<Answer>& answers) {
  return std::any_of(answers.begin(), answers.end(), [&](const Answer& answer) {
    const int rank = rank_in_group(group, answer.rank_in_job);
    return rank != Membership::kNotAMember && rank < group.rank && answer.call && !answer.is_over;
  });
}

}  // namespace lockstep::detail
