#include "comm/group/group.h"

#include <algorithm>
#include <thread>

#include <ATen/record_function.h>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

// Overview: how a call travels.
//
// 1. A collective of ProcessGroup checks its arguments and makes a Call (comm/collectives.cpp): a fingerprint of what
// it
//    does, and a body that calls the backend.
// 2. run() makes the call on this thread, after all earlier ones. submit() leaves it to the thread of the WorkQueue. If
//    the backend queues calls on a device, both make it on this thread, and the device runs it later: queued_calls.cpp.
// 3. execute() numbers the call, notes it in the flight recorder, and runs the body in guard() while a Watched exists.
//    The body gets a deadline and a hash of the fingerprint and the number. Backends compare the hashes of all ranks,
//    so ranks that make different calls get a MismatchError instead of each other's data.
// 4. While the body blocks, the job's thread calls on_tick(). A call that takes long asks the other ranks what they are
//    doing. on_answers() finds ranks that make another call, or names the stragglers in a warning.
//
// How failure travels back.
//
// - If the body throws, fail() finds the cause (diagnose): it asks the other ranks for their calls, and reports the
//   cause to the store. A rank that only sees a broken connection reports a symptom. The store keeps the first certain
//   cause of the job and sends it to all ranks.
// - mark_broken() notes the cause, and wake() ends the calls that block in the backend. The job calls on_failure() with
//   the cause that another rank has reported, which does the same. All later calls throw this cause.
// - A rank that leaves in order reports its number of calls. A later call can never complete (departure_before), so its
//   cause is that departure, even if a broken connection is noticed first.
// - Job::blame() reports to the launcher which rank a failure names, before a thread of this rank sees the error and
//   can end the process: otherwise the launcher could take this process for the first one that failed.

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

Group::Group(Membership membership, std::shared_ptr<Job> job, std::unique_ptr<Backend> backend,
             std::shared_ptr<Group> cpu_group)
    : membership_(std::move(membership)),
      rank_in_job_(job->rank()),
      recorder_(job->recorder()),
      activity_(job->activity()),
      is_queueing_(backend && backend->is_queueing()),
      cpu_group_(std::move(cpu_group)),
      mutex_(recorder_->mutex()),
      parts_(std::make_shared<Parts>(
          Parts{std::move(job), std::shared_ptr<Backend>(backend.release(), DeleteInOwner())})) {
  if (parts_->backend) parts_->job->subscribe(membership_.name, *this);
}

Group& Group::for_device(c10::DeviceType type) {
  return cpu_group_ && cpu_group_->membership_.device.type() == type ? *cpu_group_ : *this;
}

Group::~Group() {
  auto parts = parts_if_any();
  if (!parts) return;
  if (size_t pending = queue_.pending(); pending > 0) {
    log_warning(text(speaker(membership_), ": the process group was destroyed with ", pending,
                     " calls pending; call wait() on each asynchronous call before the group is destroyed"));
    abort(std::make_exception_ptr(PeerError(text("the process group was destroyed on rank ", membership_.rank))));
  }
  try {
    if (!failure() && std::uncaught_exceptions() == 0) queued_.synchronize();
  } catch (const std::exception& error) {
    log_warning(text(speaker(membership_), ": the device did not finish its last calls: ", error.what()));
  }
  leave(parts);
}

void Group::leave(const std::shared_ptr<Parts>& parts) {
  if (!parts->backend) return;
  parts->job->unsubscribe(*this);
  if (std::uncaught_exceptions() > 0)  // an exception unwinds this rank
    return parts->job->give_up_group(membership_.name, describe_rank(membership_, membership_.rank));
  announce_all_sends(*parts->job);
  parts->job->leave(membership_.name, calls(), membership_.size);
}

void Group::destroy() {
  check_process();
  if (cpu_group_) cpu_group_->destroy();
  if (auto side = side_group()) side->destroy();
  queue_.run([this](WorkQueue::Lock& lock) {
    auto parts = parts_;
    lock.unlock();
    if (!parts) return;
    if (!failure()) queued_.synchronize();
    leave(parts);
    lock.lock();
    parts_.reset();
    any_sender_.changed.notify_all();
    lock.unlock();  // the parts are destroyed without the mutex
  });
}

std::shared_ptr<Group::Parts> Group::parts_if_any() const {
  std::lock_guard lock(mutex_);
  return parts_;
}

std::shared_ptr<Group::Parts> Group::parts() const {
  check_process();
  auto parts = parts_if_any();
  if (!parts) refuse_destroyed();
  return parts;
}

void Group::refuse_destroyed() const {
  throw UsageError(text("group '", membership_.name, "' was destroyed; create a new one"));
}

std::shared_ptr<Backend> Group::backend() const {
  auto parts = this->parts();
  if (!parts->backend)
    throw UsageError(text("rank ", parts->job->rank(), " of the job is not in group '", membership_.name,
                          "', which has ranks ", enumerate(ranks_in_job(membership_)),
                          "; check contains_me() before the call"));
  return parts->backend;
}

int64_t Group::calls() const {
  std::lock_guard lock(mutex_);
  return calls_;
}

std::shared_ptr<Group> Group::side_group() const {
  std::lock_guard lock(mutex_);
  return side_group_;
}

void Group::set_side_group(std::shared_ptr<Group> group) {
  std::lock_guard lock(mutex_);
  side_group_ = std::move(group);
}

int Group::next_child() {
  check_process();
  std::lock_guard lock(mutex_);
  return ++children_;
}

std::exception_ptr Group::failure() const {
  std::lock_guard lock(mutex_);
  return failure_;
}

std::chrono::milliseconds Group::timeout_of(const CallOptions& options) const {
  auto timeout = options.timeout.value_or(membership_.timeout);
  if (timeout <= std::chrono::milliseconds(0))
    throw UsageError(
        text(speaker(membership_), ": the time-out of a call is ", timeout.count(), " ms; it must be above 0"));
  return timeout;
}

// --- making calls

void Group::run(const Call& call, const CallOptions& options) {
  check_process();
  auto timeout = timeout_of(options);
  const ActivityScope blocked(activity_.get(), Activity::Phase::kCommunication);
  queue_.run([&](WorkQueue::Lock& lock) { execute(lock, call, options, timeout, Backend::Stream::kCurrent, nullptr); });
}

Work Group::submit(Call call, const CallOptions& options) {
  check_process();
  auto timeout = timeout_of(options);
  if (is_queueing_) return queue(std::make_shared<const Call>(std::move(call)), options, timeout);
  return Work(queue_.submit([this, call = std::move(call), options, timeout](WorkQueue::Lock& lock) {
    execute(lock, call, options, timeout, Backend::Stream::kCurrent, nullptr);
  }));
}

std::shared_ptr<QueuedCall> Group::execute(WorkQueue::Lock& lock, const Call& call, const CallOptions& options,
                                           std::chrono::milliseconds timeout, Backend::Stream stream,
                                           std::shared_ptr<const void> kept) {
  if (!parts_) refuse_destroyed();
  Backend& backend = *parts_->backend;  // valid during this turn: destroy() waits for its own turn
  CallRecord record{0, membership_.name, {++calls_}, call.fingerprint, options.site};
  record.ticket = recorder_->begin(record);
  Watched watched(*this, lock, record, record.started);
  lock.unlock();
  std::optional<at::RecordFunction> profile;
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION))
    profile.emplace(std::move(*callbacks)).before(text("lockstep::", name_of(call.fingerprint.operation)));
  if (!is_queueing_) {
    guard(watched, timeout, [&](const CallInfo& info) { call.body(backend, info); });
    watched.outcome = CallRecord::State::kDone;
    return nullptr;
  }
  std::shared_ptr<QueuedCall> queued;
  guard(watched, timeout, [&](const CallInfo& info) {
    queued = backend.queue([&] { call.body(backend, info); }, stream);
    if (queued) queued_.add({record, queued, std::move(kept), timeout, Backoff(record.started, info.deadline)});
  });
  watched.outcome = queued ? CallRecord::State::kRunning : CallRecord::State::kDone;
  return queued;
}

void Group::run_aside(Operation operation, const CallOptions& options,
                      const std::function<void(const CallRecord&, std::chrono::milliseconds timeout)>& body) {
  check_process();
  auto timeout = timeout_of(options);
  const ActivityScope blocked(activity_.get(), Activity::Phase::kCommunication);
  queue_.run([&](WorkQueue::Lock& lock) {
    if (!parts_) refuse_destroyed();
    if (failure_)
      rethrow_with_prefix(
          failure_, text(speaker(membership_), ": ", name_of(operation), ": the group is broken by an earlier error: "),
          "", membership_.rank);
    CallRecord record{0, membership_.name, {++aside_[operation], {}, operation}, {operation}, options.site};
    record.ticket = recorder_->begin(record);
    auto end = [&](CallRecord::State state) {
      lock.lock();
      recorder_->change(record.ticket, state);
    };
    lock.unlock();
    try {
      body(record, timeout);
    } catch (...) {
      end(CallRecord::State::kFailed);
      throw;
    }
    end(CallRecord::State::kDone);
  });
}

Group::Watched::Watched(Group& group, WorkQueue::Lock& lock, const CallRecord& record, Clock::time_point begin)
    : group(group), lock(lock), record(record), begin(begin), backoff(begin) {
  refusal = group.failure_;
  // If a rank left first, its departure is the cause, even if ranks in this call have reported a different one.
  if (!refusal || group.departure_came_first_)
    if (auto departure = group.departure_before(record.call_id)) refusal = departure;
  if (!group.failure_ && refusal) {
    group.failure_ = refusal;
    breaks_group = true;
  }
  group.watched_.push_back(this);
}

Group::Watched::~Watched() {
  if (!lock.owns_lock()) lock.lock();
  if (outcome != CallRecord::State::kRunning) group.recorder_->change(record.ticket, outcome);
  std::erase(group.watched_, this);
}

void Group::guard(const Watched& watched, std::chrono::milliseconds timeout,
                  const std::function<void(const CallInfo&)>& body) {
  const CallRecord& record = watched.record;
  if (watched.refusal) {
    if (watched.breaks_group) {
      blame_departure(watched.refusal);
      on_failure(watched.refusal);
    }
    rethrow_with_prefix(
        watched.refusal,
        text(speaker(membership_), ": ", name_of(record.call.operation), ": the group is broken by an earlier error: "),
        flight_recorder_suffix(watched.refusal), membership_.rank);
  }
  try {
    body({deadline_after(timeout, watched.begin), hash(record.call, record.call_id)});
  } catch (...) {
    fail(record, timeout, std::current_exception());
  }
}

// Other ranks may be in the middle of this call, so no later call can succeed: the group is broken.
void Group::fail(const CallRecord& record, std::chrono::milliseconds timeout, std::exception_ptr error) {
  bool is_foreign = !is_ours(error);
  bool is_local = is_foreign || is_a<UsageError>(error) || is_a<SystemError>(error);  // concerns only this rank
  auto known = failure();
  auto cause = mark_broken(known ? known : diagnose(record, timeout, error));
  std::string flight = flight_recorder_suffix(cause);
  wake();
  if (is_foreign && !known) std::rethrow_exception(error);
  if (is_local && !known) cause = error;
  bool names_me = rank_of(cause) == job()->rank();
  rethrow_with_prefix(cause, names_me ? "" : text(speaker(membership_), ": ", name_of(record.call.operation), ": "),
                      flight, membership_.rank);
}

std::exception_ptr Group::diagnose(const CallRecord& record, std::chrono::milliseconds timeout,
                                   const std::exception_ptr& error) {
  auto job = this->job();
  bool is_timeout = is_a<TimeoutError>(error);
  if (is_timeout || is_a<MismatchError>(error)) {
    job->will_report(membership_.name);
    auto answers = is_timeout ? job->ask(membership_.name, describe(record.call_id)) : ask_when_all_came(record);
    auto mismatch = find_mismatch(membership_, record, answers);
    Failure failure = mismatch     ? mismatch_failure(record, *mismatch, answers)
                      : is_timeout ? timeout_failure(record, timeout, answers)
                                   : own_failure(ErrorKind::kMismatch, text(describe(record), ": ", message_of(error)));
    job->blame(failure);
    // A rank that does not know how the calls differ reports a symptom, so that a rank that knows reports the cause.
    bool is_certain = mismatch || is_timeout;
    return to_exception(
        job->report(membership_.name, failure, is_certain ? Job::Certainty::kCertain : Job::Certainty::kSymptom));
  }
  bool is_symptom = is_a<PeerError>(error);
  auto failure = own_failure(ErrorKind::kPeer, text(describe(record), ": ", message_of(error)));
  auto cause = job->report(membership_.name, failure, is_symptom ? Job::Certainty::kSymptom : Job::Certainty::kCertain);
  std::unique_lock lock(mutex_);
  auto departure = is_symptom ? departure_before({calls_}) : nullptr;
  lock.unlock();
  if (!departure) return to_exception(cause);
  blame_departure(departure);
  return departure;
}

// Two different calls do not show which of them is wrong. The calls of the other ranks show it, and may begin slightly
// later. So this retries for a short time.
std::vector<Answer> Group::ask_when_all_came(const CallRecord& record) const {
  constexpr auto kPause = std::chrono::milliseconds(10);
  const auto deadline = Clock::now() + std::chrono::milliseconds(300);
  for (;;) {
    auto answers = job()->ask(membership_.name, describe(record.call_id));
    if (Clock::now() >= deadline || !first_straggler(membership_, record.call_id, answers)) return answers;
    std::this_thread::sleep_for(kPause);
  }
}

Failure Group::timeout_failure(const CallRecord& record, std::chrono::milliseconds timeout,
                               const std::vector<Answer>& answers) const {
  auto failure =
      own_failure(ErrorKind::kTimeout, text(describe(record), " did not finish within ", timeout.count(), " ms. ",
                                            describe_stragglers(membership_, record.call_id, answers)));
  if (auto rank = first_straggler(membership_, record.call_id, answers))
    failure.culprit = Culprit{*rank, CulpritRole::kLate};
  return failure;
}

Failure Group::mismatch_failure(const CallRecord& record, const std::string& mismatch,
                                const std::vector<Answer>& answers) const {
  auto failure = own_failure(ErrorKind::kMismatch, mismatch);
  if (auto rank = find_odd_rank(membership_, record, answers)) failure.culprit = Culprit{*rank, CulpritRole::kDiffers};
  return failure;
}

// A failure that this rank found; its message begins with this rank.
Failure Group::own_failure(ErrorKind kind, const std::string& message) const {
  return {kind, text(speaker(membership_), ": ", message), {}, membership_.peers.at(membership_.rank).rank};
}

// Waits for the device first: a caller that sees the error may free or reuse the tensors of queued calls.
std::string Group::flight_recorder_suffix(const std::exception_ptr& cause) {
  queued_.await_end();
  auto parts = parts_if_any();
  if (!parts || membership_.size == 1) return "";
  const auto path = parts->job->dump_flight(message_of(cause));
  activity_->report_failure();
  return text(". Flight recorder: ", path);
}

void Group::check_working() {
  check_process();
  if (auto earlier = failure())
    rethrow_with_prefix(earlier, text(speaker(membership_), ": the group is broken: "), flight_recorder_suffix(earlier),
                        membership_.rank);
}

// --- failures

void Group::abort(const std::exception_ptr& cause) {
  check_process();
  mark_broken(cause);
  if (auto parts = parts_if_any(); parts && parts->backend)
    parts->job->report_async(membership_.name, to_failure(cause));
  wake();
}

std::exception_ptr Group::mark_broken(const std::exception_ptr& cause) {
  if (cpu_group_) cpu_group_->mark_broken(cause);
  if (auto side = side_group()) side->mark_broken(cause);
  std::lock_guard lock(mutex_);
  if (!failure_) {
    failure_ = cause;
    departure_came_first_ = departure_.has_value();
  }
  any_sender_.changed.notify_all();
  return failure_;
}

void Group::wake() {
  if (cpu_group_) cpu_group_->wake();
  if (auto side = side_group()) side->wake();
  auto parts = parts_if_any();
  if (parts && parts->backend) parts->backend->abort(failure());
}

void Group::on_failure(std::exception_ptr cause) {
  mark_broken(cause);
  wake();
}

void Group::on_left(int rank_in_job, int64_t calls) {
  int rank = rank_in_group(membership_, rank_in_job);
  if (rank == Membership::kNotAMember) return;
  std::exception_ptr cause;
  {
    std::lock_guard lock(mutex_);
    left_.insert(rank);
    any_sender_.changed.notify_all();
    if (!departure_ || calls < departure_->calls) departure_ = {calls, rank_in_job, describe_rank(membership_, rank)};
    for (const Watched* watched : watched_)
      if (auto departure = departure_before(watched->record.call_id)) cause = departure;
    for (const auto& queued : queued_.entries())
      if (auto departure = departure_before(queued.record.call_id)) cause = departure;
  }
  if (!cause) return;
  blame_departure(cause);  // before a thread of this rank can end the process
  on_failure(cause);
}

void Group::blame_departure(const std::exception_ptr& cause) {
  if (auto parts = parts_if_any()) parts->job->blame(to_failure(cause));
}

// Requires mutex_. Returns why a collective cannot succeed if a rank left before it, else null.
std::exception_ptr Group::departure_before(const CallId& call_id) const {
  if (!departure_ || call_id.message || call_id.number <= departure_->calls) return nullptr;
  return std::make_exception_ptr(
      PeerError(text(departure_->who, " has left group '", membership_.name, "' after ", departure_->calls,
                     " calls, but this is call ", call_id.number,
                     ": its program destroyed the group or exited. Make the same calls on all ranks; for uneven inputs "
                     "use join"),
                std::nullopt, Culprit{departure_->rank_in_job, CulpritRole::kLeft}));
}

// --- diagnosing calls that take long

void Group::on_tick() {
  retire_queued();
  auto now = Clock::now();
  std::vector<std::string> call_ids;
  std::shared_ptr<Parts> parts;
  {
    std::lock_guard lock(mutex_);
    parts = parts_;
    if (failure_) return;
    for (Watched* watched : watched_)
      if (watched->backoff.is_due(now)) call_ids.push_back(describe(watched->record.call_id));
    if (auto* oldest = queued_.oldest(); oldest && oldest->backoff.is_due(now))
      call_ids.push_back(describe(oldest->record.call_id));
  }
  for (const auto& call_id : call_ids) parts->job->ask(*this, membership_.name, call_id);
}

void Group::on_answers(const std::string& call_id, const std::vector<Answer>& answers) {
  std::optional<Failure> failure;
  std::shared_ptr<Parts> parts;
  std::string notice;
  auto look_at = [&](const CallRecord& record, Backoff& backoff) {
    if (describe(record.call_id) != call_id) return false;
    if (auto mismatch = find_mismatch(membership_, record, answers))
      failure = mismatch_failure(record, *mismatch, answers);
    if (backoff.take_notice() && !lower_rank_also_waits(membership_, answers))
      notice = text(speaker(membership_), ": ", describe(record), " has waited for ", backoff.seconds(Clock::now()),
                    " s. ", describe_stragglers(membership_, record.call_id, answers));
    return true;
  };
  {
    std::lock_guard lock(mutex_);
    parts = parts_;
    if (failure_) return;
    for (Watched* watched : watched_) look_at(watched->record, watched->backoff);
    auto* oldest = queued_.oldest();  // no thread blocks on it, so its time-out is checked here
    if (oldest && look_at(oldest->record, oldest->backoff) && !failure && oldest->backoff.is_time_up(Clock::now()))
      failure = timeout_failure(oldest->record, oldest->timeout, answers);
  }
  if (failure) {
    parts->job->blame(*failure);
    parts->job->report(*this, membership_.name, *failure);
  } else if (!notice.empty()) {
    log_warning(notice);
  }
}

}  // namespace lockstep::detail
