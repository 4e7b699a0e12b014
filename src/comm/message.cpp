#include "comm/group.h"

namespace lockstep::detail {

Group::Message::Message(std::shared_ptr<Group> group, const Route& route, Fingerprint call, const CallOptions& options,
                        const Start& start)
    : group_(std::move(group)),
      job_(group_->job()),
      backend_(group_->backend()),
      timeout_(group_->timeout_of(options)) {
  WorkQueue::Lock lock(group_->mutex_);
  record_ = {0, group_->membership_.name, {++group_->messages_[route], route}, std::move(call), options.site};
  record_.state = CallRecord::State::kPosted;
  record_.ticket = group_->recorder_->begin(record_);
  guard(lock, record_.started, CallRecord::State::kPosted,
        [&](const CallInfo& info) { transfer_ = start(*backend_, info.fingerprint); });
}

// With the group's mutex held.
void Group::Message::guard(WorkQueue::Lock& lock, std::chrono::steady_clock::time_point begin,
                           CallRecord::State outcome, const std::function<void(const CallInfo&)>& body) {
  Watched watched(*group_, lock, record_, begin);
  if (!group_->parts_) group_->refuse_destroyed();
  lock.unlock();
  group_->guard(watched, timeout_, body);
  watched.outcome = outcome;
}

Group::Message::~Message() {
  if (!transfer_) return;
  std::lock_guard lock(group_->mutex_);
  group_->recorder_->change(record_.ticket, CallRecord::State::kFailed);
}

void Group::Message::wait() {
  std::shared_ptr<Transfer> transfer;
  {
    std::lock_guard lock(mutex_);
    transfer = transfer_;
  }
  if (!transfer) return;
  {
    WorkQueue::Lock lock(group_->mutex_);
    group_->recorder_->change(record_.ticket, CallRecord::State::kRunning);
    guard(lock, std::chrono::steady_clock::now(), CallRecord::State::kDone,
          [&](const CallInfo& info) { transfer->wait(info.deadline); });
  }
  std::lock_guard lock(mutex_);
  transfer_.reset();
}

bool Group::Message::is_done() {
  std::lock_guard lock(mutex_);
  return !transfer_ || transfer_->is_done();
}

}  // namespace lockstep::detail
