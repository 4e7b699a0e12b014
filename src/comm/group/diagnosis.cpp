#include "comm/group/diagnosis.h"

#include <thread>

#include "base/error.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

// Two different calls do not show which of them is wrong. The calls of the other ranks show it, and may begin slightly
// later. So this retries for a short time.
std::vector<Answer> ask_when_all_arrived(const Membership& me, Job& job, const CallRecord& record) {
  constexpr auto kPause = std::chrono::milliseconds(10);
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  for (;;) {
    auto answers = job.ask(me.name, describe(record.call_id));
    if (std::chrono::steady_clock::now() >= deadline || !first_straggler(me, record.call_id, answers)) return answers;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace

std::exception_ptr diagnose(const Membership& me, Job& job, const CallRecord& record, std::chrono::milliseconds timeout,
                            const std::exception_ptr& error) {
  const auto found = [&](ErrorKind kind) {
    return own_failure(me, kind, text(describe(record), ": ", without_rank(message_of(error), me.rank)));
  };
  // A rank that does not know how the calls differ, or why a connection broke, reports a symptom, so that a rank that
  // knows reports the cause.
  const auto report = [&](const Failure& failure, bool is_certain) {
    return to_exception(job.report(me.name, failure, is_certain ? Job::Certainty::kCertain : Job::Certainty::kSymptom));
  };
  const bool is_timeout = is_a<TimeoutError>(error);
  if (!is_timeout && !is_a<MismatchError>(error)) return report(found(ErrorKind::kPeer), !is_a<PeerError>(error));
  job.will_report(me.name);
  const auto answers = is_timeout ? job.ask(me.name, describe(record.call_id)) : ask_when_all_arrived(me, job, record);
  auto failure = mismatch_failure(me, record, answers);
  const bool is_certain = failure || is_timeout;
  if (!failure) failure = is_timeout ? timeout_failure(me, record, timeout, answers) : found(ErrorKind::kMismatch);
  job.blame(*failure);
  return report(*failure, is_certain);
}

std::optional<Failure> mismatch_failure(const Membership& me, const CallRecord& record,
                                        const std::vector<Answer>& answers) {
  const auto mismatch = find_mismatch(me, record, answers);
  if (!mismatch) return std::nullopt;
  auto failure = own_failure(me, ErrorKind::kMismatch, *mismatch);
  if (const auto rank = find_odd_rank(me, record, answers)) failure.culprit = Culprit{*rank, CulpritRole::kDiffers};
  return failure;
}

Failure timeout_failure(const Membership& me, const CallRecord& record, std::chrono::milliseconds timeout,
                        const std::vector<Answer>& answers) {
  auto failure = own_failure(me, ErrorKind::kTimeout,
                             text(describe(record), " did not finish within ", timeout.count(), " ms. ",
                                  describe_stragglers(me, record.call_id, answers)));
  if (const auto rank = first_straggler(me, record.call_id, answers))
    failure.culprit = Culprit{*rank, CulpritRole::kLate};
  return failure;
}

Failure own_failure(const Membership& me, ErrorKind kind, const std::string& message) {
  return {kind, text(describe_me(me), ": ", message), {}, me.peers.at(me.rank).rank};
}

}  // namespace lockstep::detail
