#include "comm/group/call_watch.h"

#include <algorithm>
#include <optional>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/group/diagnosis.h"

// Overview: how a failure reaches all ranks.
//
// - While a call blocks, the job's thread calls on_tick(). A call that takes long asks the other ranks what they are
//   doing. on_answers() finds ranks that make another call, or names the stragglers in a warning.
// - If the call throws, fail() finds the cause (diagnosis.h) and reports it to the store. A rank that sees only a
//   broken connection reports a symptom. The store keeps the first certain cause of the job and sends it to all ranks.
// - mark_broken() notes the cause, and wake() ends the calls that block in the backend. The job calls on_failure() with
//   the cause that another rank has reported, which does the same. All later calls throw this cause.
// - A rank that leaves in order reports its number of calls. A later call can never complete (Departures), so its cause
//   is that departure, even if a broken connection is noticed first.
// - Job::blame() reports to the launcher which rank a failure names, before a thread of this rank sees the error and
//   can end the process: otherwise the launcher could take this process for the first one that failed.

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

// --- calls on which a thread blocks

CallWatch::Call::Call(CallWatch& watch, WorkQueue::Lock& lock, const CallRecord& record, Clock::time_point begin)
    : watch_(watch), lock_(lock), record_(record), begin_(begin), backoff_(begin) {
  refusal_ = watch.failure_;
  // If a rank left first, its departure is the cause, even if ranks in this call have reported a different one.
  if (!refusal_ || watch.departure_came_first_)
    if (auto departure = watch.departures_.failure_of(record.call_id)) refusal_ = departure;
  if (!watch.failure_ && refusal_) {
    watch.failure_ = refusal_;
    breaks_group_ = true;
  }
  watch.calls_.push_back(this);
}

CallWatch::Call::~Call() {
  if (!lock_.owns_lock()) lock_.lock();
  if (outcome_ != CallRecord::State::kRunning) watch_.recorder_.change(record_.ticket, outcome_);
  std::erase(watch_.calls_, this);
}

void CallWatch::Call::check() {
  if (!refusal_) return;
  if (breaks_group_) {
    watch_.blame(refusal_);
    watch_.on_failure(refusal_);
  }
  rethrow_with_prefix(refusal_,
                      text(describe_me(watch_.me_), ": ", name_of(record_.call.operation),
                           ": the group is broken by an earlier error: "),
                      watch_.flight_recorder_suffix(refusal_), watch_.me_.rank);
}

CallInfo CallWatch::Call::info(std::chrono::milliseconds timeout) const {
  return {deadline_after(timeout, begin_), hash(record_.call, record_.call_id)};
}

void CallWatch::Call::fail(std::chrono::milliseconds timeout) {
  watch_.fail(record_, timeout, std::current_exception());
}

// --- failures

// Other ranks may be in the middle of this call, so no later call can succeed: the group is broken.
void CallWatch::fail(const CallRecord& record, std::chrono::milliseconds timeout, std::exception_ptr error) {
  const bool is_foreign = !is_lockstep_error(error);
  const bool is_local = is_foreign || is_a<UsageError>(error) || is_a<SystemError>(error);  // concerns only this rank
  const auto known = failure();
  auto cause = mark_broken(known ? known : find_cause(record, timeout, error));
  const auto flight = flight_recorder_suffix(cause);
  wake();
  if (is_foreign && !known) std::rethrow_exception(error);
  if (is_local && !known) cause = error;
  const bool names_this_rank = rank_of(cause) == me_.peers.at(me_.rank).rank;
  rethrow_with_prefix(cause, names_this_rank ? "" : text(describe_me(me_), ": ", name_of(record.call.operation), ": "),
                      flight, me_.rank);
}

std::exception_ptr CallWatch::find_cause(const CallRecord& record, std::chrono::milliseconds timeout,
                                         const std::exception_ptr& error) {
  auto cause = diagnose(me_, *connection_.parts()->job, record, timeout, error);
  if (!is_a<PeerError>(error)) return cause;
  std::unique_lock lock(recorder_.mutex());
  const auto departure = departures_.failure_of(record.call_id);
  lock.unlock();
  if (!departure) return cause;
  blame(departure);
  return departure;
}

void CallWatch::blame(const std::exception_ptr& cause) {
  if (auto parts = connection_.parts_if_any()) parts->job->blame(to_failure(cause));
}

// Waits for the device first: a caller that sees the error may free or reuse the tensors of queued calls.
std::string CallWatch::flight_recorder_suffix(const std::exception_ptr& cause) {
  queued_.await_end();
  const auto parts = connection_.parts_if_any();
  if (!parts || me_.size == 1) return "";
  const auto path = parts->job->dump_flight(message_of(cause));
  parts->job->activity()->report_failure();
  return text(". Flight recorder: ", path);
}

std::exception_ptr CallWatch::failure() const {
  std::lock_guard lock(recorder_.mutex());
  return failure_;
}

void CallWatch::check_working(const std::string& prefix) {
  if (auto earlier = failure())
    rethrow_with_prefix(earlier, text(describe_me(me_), ": ", prefix), flight_recorder_suffix(earlier), me_.rank);
}

void CallWatch::add_companion(CallWatch& companion) {
  std::lock_guard lock(recorder_.mutex());
  companions_.push_back(&companion);
}

std::vector<CallWatch*> CallWatch::companions() const {
  std::lock_guard lock(recorder_.mutex());
  return companions_;
}

void CallWatch::abort(const std::exception_ptr& cause) {
  mark_broken(cause);
  if (auto parts = connection_.parts_if_any(); parts && parts->backend)
    parts->job->report_async(me_.name, to_failure(cause));
  wake();
}

std::exception_ptr CallWatch::mark_broken(const std::exception_ptr& cause) {
  for (auto* companion : companions()) companion->mark_broken(cause);
  std::lock_guard lock(recorder_.mutex());
  if (!failure_) {
    failure_ = cause;
    departure_came_first_ = departures_.any();
  }
  return failure_;
}

void CallWatch::wake() {
  for (auto* companion : companions()) companion->wake();
  if (auto parts = connection_.parts_if_any(); parts && parts->backend) parts->backend->abort(failure());
}

// --- events of the job

void CallWatch::on_failure(std::exception_ptr cause) {
  mark_broken(cause);
  wake();
}

void CallWatch::on_left(int rank_in_job, int64_t calls) {
  const int rank = rank_in_group(me_, rank_in_job);
  if (rank == Membership::kNotAMember) return;
  std::exception_ptr cause;
  {
    std::lock_guard lock(recorder_.mutex());
    departures_.add(rank, calls);
    for (const Call* call : calls_)
      if (auto departure = departures_.failure_of(call->record_.call_id)) cause = departure;
    for (const auto& queued : queued_.entries())
      if (auto departure = departures_.failure_of(queued.record.call_id)) cause = departure;
  }
  if (!cause) return;
  blame(cause);  // before a thread of this rank can end the process
  on_failure(cause);
}

void CallWatch::on_tick() {
  retire_queued();
  const auto now = Clock::now();
  std::vector<std::string> call_ids;
  {
    std::lock_guard lock(recorder_.mutex());
    if (failure_) return;
    for (Call* call : calls_)
      if (call->backoff_.is_due(now)) call_ids.push_back(describe(call->record_.call_id));
    if (auto* oldest = queued_.oldest(); oldest && oldest->backoff.is_due(now))
      call_ids.push_back(describe(oldest->record.call_id));
  }
  const auto parts = connection_.parts_if_any();
  for (const auto& call_id : call_ids) parts->job->ask(*this, me_.name, call_id);
}

void CallWatch::on_answers(const std::string& call_id, const std::vector<Answer>& answers) {
  std::optional<Failure> failure;
  std::string notice;
  const auto check = [&](const CallRecord& record, Backoff& backoff) {
    if (describe(record.call_id) != call_id) return false;
    if (auto mismatch = mismatch_failure(me_, record, answers)) failure = std::move(mismatch);
    if (backoff.take_notice() && !lower_rank_also_waits(me_, answers))
      notice = text(describe_me(me_), ": ", describe(record), " has waited for ", backoff.seconds(Clock::now()), " s. ",
                    describe_stragglers(me_, record.call_id, answers));
    return true;
  };
  {
    std::lock_guard lock(recorder_.mutex());
    if (failure_) return;
    for (Call* call : calls_) check(call->record_, call->backoff_);
    auto* oldest = queued_.oldest();  // no thread blocks on it, so its time-out is checked here
    if (oldest && check(oldest->record, oldest->backoff) && !failure && oldest->backoff.is_time_up(Clock::now()))
      failure = timeout_failure(me_, oldest->record, oldest->timeout, answers);
  }
  if (failure) {
    const auto parts = connection_.parts_if_any();
    parts->job->blame(*failure);
    parts->job->report(*this, me_.name, *failure);
  } else if (!notice.empty()) {
    log_warning(notice);
  }
}

void CallWatch::retire_queued() {
  if (failure()) return;
  try {
    queued_.retire();
  } catch (const Error& error) {
    if (auto parts = connection_.parts_if_any())
      parts->job->report(*this, me_.name, own_failure(me_, ErrorKind::kPeer, without_rank(error.what(), me_.rank)));
  }
}

}  // namespace lockstep::detail
