#include "comm/group.h"

#include <algorithm>

#include <ATen/record_function.h>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/log.h"
#include "base/rethrow.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

using Clock = std::chrono::steady_clock;

// A call that waits this long asks the other ranks what they are doing, then after twice as long again, and so on.
constexpr auto kPatience = std::chrono::milliseconds(300);
constexpr auto kMostPatience = std::chrono::seconds(30);

}  // namespace

Group::Group(Membership membership, std::shared_ptr<Job> job, std::unique_ptr<Backend> backend)
    : membership_(std::move(membership)), parts_(std::make_shared<Parts>(Parts{std::move(job), std::move(backend)})) {
  if (parts_->backend) parts_->job->subscribe(membership_.name, *this);
}

Group::~Group() {
  auto parts = parts_if_any();
  if (!parts) return;
  if (size_t pending = queue_.pending(); pending > 0) {
    log_warning(text(speaker(membership_), ": the process group was destroyed with ", pending,
                     " calls pending; wait() for each asynchronous call before the group goes"));
    abort(std::make_exception_ptr(PeerError(text("the process group was destroyed on rank ", membership_.rank))));
  }
  leave(parts);
}

void Group::leave(const std::shared_ptr<Parts>& parts) {
  if (!parts->backend) return;
  parts->job->unsubscribe(*this);
  if (std::uncaught_exceptions() > 0)  // not in order
    return parts->job->give_up_group(membership_.name, describe_rank(membership_, membership_.rank));
  std::lock_guard lock(mutex_);
  parts->job->leave(membership_.name, calls_);
}

void Group::destroy() {
  queue_.run([this] {
    auto parts = parts_if_any();
    if (!parts) return;
    leave(parts);
    std::lock_guard lock(mutex_);
    parts_.reset();
  });
}

std::shared_ptr<Group::Parts> Group::parts_if_any() const {
  std::lock_guard lock(mutex_);
  return parts_;
}

std::shared_ptr<Group::Parts> Group::parts() const {
  auto parts = parts_if_any();
  if (!parts) refuse_destroyed();
  return parts;
}

void Group::refuse_destroyed() const {
  throw UsageError(text("group '", membership_.name, "' was destroyed; make a new one"));
}

std::shared_ptr<Backend> Group::backend() const {
  auto parts = this->parts();
  if (!parts->backend)
    throw UsageError(text("rank ", parts->job->rank(), " of the job is not in group '", membership_.name,
                          "', which has ranks ", enumerate(ranks_in_job(membership_)),
                          "; ask contains_me() before calling"));
  return parts->backend;
}

int Group::next_child() {
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

void Group::run(Call call, const CallOptions& options) {
  timeout_of(options);
  queue_.run([&] { execute(call, options); });
}

Work Group::submit(Call call, const CallOptions& options) {
  timeout_of(options);
  return Work(queue_.submit([this, call = std::move(call), options] { execute(call, options); }));
}

void Group::execute(const Call& call, const CallOptions& options) {
  CallRecord record{0, membership_.name, "", call.fingerprint, options.site};
  Watched watched(*this, record, record.started);
  std::shared_ptr<Parts> parts;
  {
    std::lock_guard lock(mutex_);
    parts = parts_;
    watched.number = ++calls_;
    record.subject = "call " + std::to_string(calls_);
    watch(watched);
  }
  if (!parts) refuse_destroyed();
  record.ticket = parts->job->recorder().begin(record);
  RECORD_FUNCTION("lockstep::" + call.fingerprint.operation, std::vector<c10::IValue>());
  this->guard(*parts, watched, timeout_of(options), [&](const CallInfo& info) { call.body(*parts->backend, info); });
  parts->job->recorder().change(record.ticket, CallRecord::State::kDone);
}

void Group::run_aside(const char* operation, const CallOptions& options,
                      const std::function<void(const CallRecord&, std::chrono::milliseconds timeout)>& body) {
  auto timeout = timeout_of(options);
  queue_.run([&] {
    auto parts = this->parts();
    if (auto earlier = failure())
      rethrow_with_prefix(earlier,
                          text(speaker(membership_), ": ", operation, ": the group is broken by an earlier error: "));
    int64_t number = 0;
    {
      std::lock_guard lock(mutex_);
      number = ++aside_[operation];
    }
    CallRecord record{0, membership_.name, text(operation, ' ', number), {operation}, options.site};
    auto& recorder = parts->job->recorder();
    record.ticket = recorder.begin(record);
    try {
      body(record, timeout);
    } catch (...) {
      recorder.change(record.ticket, CallRecord::State::kFailed);
      throw;
    }
    recorder.change(record.ticket, CallRecord::State::kDone);
  });
}

Group::Watched::Watched(Group& group, const CallRecord& record, Clock::time_point begin)
    : group(group), record(record), begin(begin), next_look(begin + kPatience), pause(kPatience) {}

Group::Watched::~Watched() {
  std::lock_guard lock(group.mutex_);
  std::erase(group.watched_, this);
}

// With mutex_ held.
void Group::watch(Watched& watched) {
  if (!failure_) {
    failure_ = departure_before(watched.number);
    watched.breaks_group = failure_ != nullptr;
  }
  watched.refusal = failure_;
  watched_.push_back(&watched);
}

void Group::guard(const Parts& parts, const Watched& watched, std::chrono::milliseconds timeout,
                  const std::function<void(const CallInfo&)>& body) {
  const CallRecord& record = watched.record;
  try {
    if (watched.refusal) {
      if (watched.breaks_group) wake();
      rethrow_with_prefix(
          watched.refusal,
          text(speaker(membership_), ": ", record.call.operation, ": the group is broken by an earlier error: "),
          flight_suffix(watched.refusal));
    }
    try {
      body({deadline_after(timeout, watched.begin), hash(record.call, record.subject)});
    } catch (...) {
      fail(record, timeout, std::current_exception());
    }
  } catch (...) {
    parts.job->recorder().change(record.ticket, CallRecord::State::kFailed);
    throw;
  }
}

// The other ranks may be in the middle of this call, so that none after it can succeed: the group is over.
void Group::fail(const CallRecord& record, std::chrono::milliseconds timeout, std::exception_ptr error) {
  bool is_foreign = !is_ours(error);
  bool is_local = is_foreign || is_a<UsageError>(error) || is_a<SystemError>(error);  // about this rank alone
  auto known = failure();
  auto cause = mark_broken(known ? known : diagnose(record, timeout, error));
  std::string flight = flight_suffix(cause);
  wake();
  if (is_foreign && !known) std::rethrow_exception(error);
  if (is_local && !known) cause = error;
  std::string me = text(speaker(membership_), ": ");
  bool says_so_already = message_of(cause).starts_with(me);
  rethrow_with_prefix(cause, says_so_already ? "" : text(me, record.call.operation, ": "), flight);
}

std::exception_ptr Group::diagnose(const CallRecord& record, std::chrono::milliseconds timeout,
                                   const std::exception_ptr& error) {
  auto job = this->job();
  std::string me = text(speaker(membership_), ": ");
  bool is_timeout = is_a<TimeoutError>(error);
  if (is_timeout || is_a<MismatchError>(error)) {
    job->announce_report(membership_.name);
    auto answers = job->ask(membership_.name, record.subject);
    auto mismatch = find_mismatch(membership_, record, answers);
    Failure failure = mismatch ? Failure{"MismatchError", me + *mismatch}
                      : is_timeout
                          ? Failure{"TimeoutError", text(me, describe(record), " did not finish within ",
                                                         timeout.count(), " ms. ", name_the_late(membership_, answers))}
                          : Failure{"MismatchError", text(me, describe(record), ": ", message_of(error))};
    // A rank that cannot tell how the calls differ leaves the word to one that can.
    bool is_certain = mismatch || is_timeout;
    return to_exception(
        job->report(membership_.name, failure, is_certain ? Job::Certainty::kCertain : Job::Certainty::kSymptom));
  }
  bool is_symptom = is_a<PeerError>(error);
  Failure failure{"PeerError", text(me, describe(record), ": ", message_of(error))};
  auto cause = job->report(membership_.name, failure, is_symptom ? Job::Certainty::kSymptom : Job::Certainty::kCertain);
  std::lock_guard lock(mutex_);
  if (auto departure = departure_before(calls_); is_symptom && departure) return departure;
  return to_exception(cause);
}

std::string Group::flight_suffix(const std::exception_ptr& cause) const {
  auto parts = parts_if_any();
  if (!parts || membership_.size == 1) return "";
  return text(". Flight recorder: ", parts->job->dump_flight(message_of(cause)));
}

void Group::check_working() const {
  if (auto earlier = failure())
    rethrow_with_prefix(earlier, text(speaker(membership_), ": the group is broken: "), flight_suffix(earlier));
}

// --- what breaks the group

void Group::abort(const std::exception_ptr& cause) {
  mark_broken(cause);
  if (auto parts = parts_if_any(); parts && parts->backend) parts->job->proclaim(membership_.name, to_failure(cause));
  wake();
}

std::exception_ptr Group::mark_broken(const std::exception_ptr& cause) {
  std::lock_guard lock(mutex_);
  if (!failure_) failure_ = cause;
  return failure_;
}

void Group::wake() {
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
    if (!departure_ || calls < departure_->calls) departure_ = {calls, describe_rank(membership_, rank)};
    for (const Watched* watched : watched_)
      if (watched->number) cause = departure_before(watched->number);
  }
  if (cause) on_failure(cause);
}

// With mutex_ held: why a call of this number cannot succeed, if a rank has left before it.
std::exception_ptr Group::departure_before(std::optional<int64_t> number) const {
  if (!departure_ || !number || *number <= departure_->calls) return nullptr;
  return std::make_exception_ptr(
      PeerError(text(departure_->who, " has left group '", membership_.name, "' after ", departure_->calls,
                     " calls, and this is call ", *number, ": its program destroyed the group, or ended")));
}

// --- finding out why a call takes long

void Group::on_tick() {
  auto now = Clock::now();
  std::vector<std::string> subjects;
  std::shared_ptr<Parts> parts;
  {
    std::lock_guard lock(mutex_);
    parts = parts_;
    if (failure_) return;
    for (Watched* watched : watched_) {
      if (now < watched->next_look) continue;
      watched->pause = std::min<std::chrono::milliseconds>(watched->pause * 2, kMostPatience);
      watched->next_look = now + watched->pause;
      subjects.push_back(watched->record.subject);
    }
  }
  for (const auto& subject : subjects) parts->job->ask(*this, membership_.name, subject);
}

void Group::on_answers(const std::string& subject, const std::vector<Answer>& answers) {
  std::optional<std::string> mismatch;
  std::shared_ptr<Parts> parts;
  {
    std::lock_guard lock(mutex_);
    parts = parts_;
    if (failure_) return;
    for (const Watched* watched : watched_)
      if (watched->record.subject == subject) mismatch = find_mismatch(membership_, watched->record, answers);
  }
  if (!mismatch) return;
  Failure failure{"MismatchError", text(speaker(membership_), ": ", *mismatch)};
  parts->job->report(*this, membership_.name, failure);
}

}  // namespace lockstep::detail
