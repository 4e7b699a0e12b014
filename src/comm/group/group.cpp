#include "comm/group/group.h"

#include <optional>

#include <ATen/record_function.h>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

// Overview: how a call is executed. call_watch.cpp describes how its failure reaches all ranks.
//
// 1. A collective of ProcessGroup checks its arguments and makes a Call (comm/collectives.cpp): a fingerprint of the
//    operation and its arguments, and a body that calls the backend.
// 2. run() makes the call on this thread, after all earlier calls. submit() leaves it to the thread of the WorkQueue.
//    If the backend queues calls on a device, both make it on this thread, and the device runs it later (QueuedCalls).
// 3. execute() numbers the call, notes it in the flight recorder, and runs the body while a CallWatch::Call watches it.
//    The body gets a deadline and a hash of the fingerprint and the number. Backends compare the hashes of all ranks,
//    so ranks that make different calls get a MismatchError instead of each other's data.

namespace lockstep::detail {

Group::Group(Membership membership, std::shared_ptr<Job> job, std::unique_ptr<Backend> backend,
             std::shared_ptr<Group> cpu_group)
    : membership_(std::move(membership)),
      rank_in_job_(job->rank()),
      recorder_(job->recorder()),
      activity_(job->activity()),
      is_queueing_(backend && backend->is_queueing()),
      cpu_group_(std::move(cpu_group)),
      mutex_(recorder_->mutex()),
      connection_(membership_, mutex_, std::move(job), std::move(backend)) {
  if (cpu_group_) watch_.add_companion(cpu_group_->watch_);
  const auto parts = connection_.parts();
  if (!parts->backend) return;
  messages_.subscribe(*parts->job);
  watch_.subscribe(*parts->job);
}

Group& Group::for_device(c10::DeviceType type) {
  return cpu_group_ && cpu_group_->membership_.device.type() == type ? *cpu_group_ : *this;
}

Group::~Group() {
  const auto parts = connection_.parts_if_any();
  if (!parts) return;
  if (size_t pending = queue_.pending(); pending > 0) {
    log_warning(text(describe_me(membership_), ": the process group was destroyed with ", pending,
                     " calls pending; call wait() on each asynchronous call before the group is destroyed"));
    abort(std::make_exception_ptr(PeerError(text("the process group was destroyed on rank ", membership_.rank))));
  }
  try {
    if (!failure() && std::uncaught_exceptions() == 0) queued_.synchronize();
  } catch (const std::exception& error) {
    log_warning(text(describe_me(membership_), ": the device did not finish its last calls: ", error.what()));
  }
  leave(*parts);
}

void Group::leave(const Connection::Parts& parts) {
  if (!parts.backend) return;
  watch_.unsubscribe(*parts.job);
  messages_.unsubscribe(*parts.job);
  if (std::uncaught_exceptions() > 0)  // an exception unwinds this rank
    return parts.job->give_up_group(membership_.name, describe_rank(membership_, membership_.rank));
  messages_.announce_all(*parts.job);
  parts.job->leave(membership_.name, calls(), membership_.size);
}

void Group::destroy() {
  check_process();
  if (cpu_group_) cpu_group_->destroy();
  if (auto side = side_group()) side->destroy();
  queue_.run([this](WorkQueue::Lock& lock) {
    lock.unlock();
    const auto parts = connection_.parts_if_any();
    if (!parts) return;
    if (!failure()) queued_.synchronize();
    leave(*parts);
    connection_.close();
  });
}

std::shared_ptr<Job> Group::job() const {
  check_process();
  return connection_.parts()->job;
}

std::shared_ptr<Backend> Group::backend() const {
  check_process();
  return connection_.backend();
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
  watch_.add_companion(group->watch_);
  std::lock_guard lock(mutex_);
  side_group_ = std::move(group);
}

int Group::next_child() {
  check_process();
  std::lock_guard lock(mutex_);
  return ++children_;
}

void Group::check_working() {
  check_process();
  watch_.check_working("the group is broken: ");
}

void Group::abort(const std::exception_ptr& cause) {
  check_process();
  watch_.abort(cause);
}

std::chrono::milliseconds Group::timeout_of(const CallOptions& options) const {
  auto timeout = options.timeout.value_or(membership_.timeout);
  if (timeout <= std::chrono::milliseconds(0))
    throw UsageError(
        text(describe_me(membership_), ": the time-out of a call is ", timeout.count(), " ms; it must be above 0"));
  return timeout;
}

// --- collectives

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
  Backend& backend = connection_.open_backend();  // valid during this turn: destroy() waits for its own turn
  CallRecord record{0, membership_.name, {++calls_}, call.fingerprint, options.site};
  record.ticket = recorder_->begin(record);
  CallWatch::Call watched(watch_, lock, record, record.started);
  lock.unlock();
  std::optional<at::RecordFunction> profile;
  if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION))
    profile.emplace(std::move(*callbacks)).before(text("lockstep::", name_of(call.fingerprint.operation)));
  watched.check();
  std::shared_ptr<QueuedCall> queued;
  try {
    const auto info = watched.info(timeout);
    if (is_queueing_)
      queued = backend.queue([&] { call.body(backend, info); }, stream);
    else
      call.body(backend, info);
    if (queued) queued_.add({record, queued, std::move(kept), timeout, Backoff(record.started, info.deadline)});
  } catch (...) {
    watched.fail(timeout);
  }
  watched.end(queued ? CallRecord::State::kRunning : CallRecord::State::kDone);
  return queued;
}

// --- calls outside the order of collectives

/// Requires the mutex.
CallRecord Group::begin_unordered(Operation operation, const CallOptions& options) {
  CallRecord record{0, membership_.name, {++unordered_calls_[operation], {}, operation}, {operation}, options.site};
  record.ticket = recorder_->begin(record);
  return record;
}

void Group::run_unordered(Operation operation, const CallOptions& options,
                          const std::function<void(const CallRecord&, std::chrono::milliseconds timeout)>& body) {
  check_process();
  auto timeout = timeout_of(options);
  const ActivityScope blocked(activity_.get(), Activity::Phase::kCommunication);
  queue_.run([&](WorkQueue::Lock& lock) {
    connection_.open_backend();  // throws if the group was destroyed
    const auto record = begin_unordered(operation, options);
    lock.unlock();
    const auto end = [&](CallRecord::State outcome) {
      lock.lock();
      recorder_->change(record.ticket, outcome);
    };
    try {
      watch_.check_working(text(name_of(operation), ": the group is broken by an earlier error: "));
      body(record, timeout);
    } catch (...) {
      end(CallRecord::State::kFailed);
      throw;
    }
    end(CallRecord::State::kDone);
  });
}

std::pair<int, CallOptions> Group::await_sender(uint32_t tag, const CallOptions& options) {
  check_process();
  const auto timeout = timeout_of(options);
  const auto deadline = deadline_after(timeout);
  if (membership_.size == 1) throw UsageError(membership_.rank, "recv_any: this group has no other rank");
  const ActivityScope blocked(activity_.get(), Activity::Phase::kCommunication);
  messages_.subscribe_to(tag);
  WorkQueue::Lock lock(mutex_);
  const auto record = begin_unordered(Operation::kRecvAny, options);
  const auto sender = messages_.await_sender(lock, tag, deadline, [&] {
    return watch_.has_failed() || !connection_.is_open() || watch_.departures().all_others_left();
  });
  recorder_->change(record.ticket, sender ? CallRecord::State::kDone : CallRecord::State::kFailed);
  const bool is_alone = watch_.departures().all_others_left();
  lock.unlock();
  if (sender) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    return {*sender, {std::max(left, std::chrono::milliseconds(1)), options.site}};
  }
  watch_.check_working("recv_any: the group is broken: ");
  connection_.parts();  // throws if the group was destroyed
  const auto prefix = text(describe_me(membership_), ": recv_any: ");
  if (is_alone)
    throw PeerError(
        text(prefix, "all other ranks have left the group, so that no message with tag ", tag, " will arrive"),
        membership_.rank, {});
  throw TimeoutError(text(prefix, "no rank has sent a message with tag ", tag, " within ", timeout.count(),
                          " ms; the group stays usable"),
                     membership_.rank, {});
}

}  // namespace lockstep::detail
