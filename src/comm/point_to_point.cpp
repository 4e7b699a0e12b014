#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/text.h"
#include "comm/group/group.h"

namespace lockstep::detail {

Group::Message::Message(std::shared_ptr<Group> group, const MessageRoute& route, Fingerprint call,
                        const CallOptions& options, const Start& start)
    : group_(std::move(group)),
      job_(group_->job()),
      backend_(group_->backend()),
      timeout_(group_->timeout_of(options)) {
  WorkQueue::Lock lock(group_->mutex_);
  record_ = {0, group_->membership_.name, {++group_->messages_[route], route}, std::move(call), options.site};
  record_.state = CallRecord::State::kPosted;
  record_.ticket = group_->recorder_->begin(record_);
  std::exception_ptr refused;  // an invalid argument, such as a tag that the backend does not support
  guard(lock, record_.started, [&](const CallInfo& info) {
    try {
      transfer_ = start(*backend_, info.fingerprint);
    } catch (const UsageError&) {  // nothing was sent, so the group stays usable
      refused = std::current_exception();
      return CallRecord::State::kFailed;
    }
    return transfer_ ? CallRecord::State::kPosted : CallRecord::State::kDone;  // an empty tensor is not sent
  });
  const int rank = group_->membership_.rank;
  if (refused) --group_->messages_[route];
  if (refused) rethrow_with_prefix(refused, text("rank ", rank, ": ", describe(record_.call), ": "), "", rank);
  const bool has_subscribers = !group_->any_sender_.subscribers.empty();
  lock.unlock();
  if (route.from == rank && has_subscribers) group_->announce_send(route);
}

// Requires the group's mutex. The body returns the new state of the record.
void Group::Message::guard(WorkQueue::Lock& lock, std::chrono::steady_clock::time_point begin,
                           const std::function<CallRecord::State(const CallInfo&)>& body) {
  Watched watched(*group_, lock, record_, begin);
  if (!group_->parts_) group_->refuse_destroyed();
  lock.unlock();
  auto outcome = CallRecord::State::kFailed;
  group_->guard(watched, timeout_, [&](const CallInfo& info) { outcome = body(info); });
  watched.outcome = outcome;
}

Group::Message::~Message() {
  if (!transfer_) return;
  std::lock_guard lock(group_->mutex_);
  group_->recorder_->change(record_.ticket, CallRecord::State::kFailed);
}

std::shared_ptr<Transfer> Group::Message::transfer() {
  std::lock_guard lock(mutex_);
  return transfer_;
}

void Group::Message::wait() {
  auto transfer = this->transfer();
  if (!transfer) return;
  {
    WorkQueue::Lock lock(group_->mutex_);
    group_->recorder_->change(record_.ticket, CallRecord::State::kRunning);
    guard(lock, std::chrono::steady_clock::now(), [&](const CallInfo& info) {
      transfer->wait(info.deadline);
      return CallRecord::State::kDone;
    });
  }
  std::lock_guard lock(mutex_);
  transfer_.reset();
}

// A caller that polls need not call wait() afterwards, so success is recorded here. Errors are left to wait(), which
// throws them, or to the destructor, which records them.
bool Group::Message::is_done() {
  auto transfer = this->transfer();
  if (!transfer) return true;
  try {
    if (!transfer->is_done()) return group_->failure() != nullptr;
    transfer->wait(deadline_after(timeout_));  // returns or throws at once
  } catch (const std::exception&) {
    return true;
  }
  {
    std::lock_guard lock(group_->mutex_);
    group_->recorder_->change(record_.ticket, CallRecord::State::kDone);
  }
  std::lock_guard lock(mutex_);
  transfer_.reset();
  return true;
}

}  // namespace lockstep::detail
