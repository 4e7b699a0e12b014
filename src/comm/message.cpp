#include "base/text.h"
#include "comm/group.h"

namespace lockstep::detail {

Group::Message::Message(std::shared_ptr<Group> group, int from, int to, uint32_t tag, Fingerprint call,
                        const CallOptions& options, const Start& start)
    : group_(std::move(group)),
      job_(group_->job()),
      backend_(group_->backend()),
      timeout_(group_->timeout_of(options)) {
  int64_t number = 0;
  {
    std::lock_guard lock(group_->mutex_);
    number = ++group_->messages_[{from, to, tag}];
  }
  record_ = {0, group_->membership_.name,
             text("message ", number, " from rank ", from, " to rank ", to, " with tag ", tag), std::move(call),
             options.site};
  record_.state = CallRecord::State::kPosted;
  record_.ticket = job_->recorder().begin(record_);
  guard(record_.started, [&](const CallInfo& info) { transfer_ = start(*backend_, info.fingerprint); });
}

void Group::Message::guard(std::chrono::steady_clock::time_point begin,
                           const std::function<void(const CallInfo&)>& body) {
  Watched watched(*group_, record_, begin);
  {
    std::lock_guard lock(group_->mutex_);
    group_->watch(watched);
  }
  group_->guard(*group_->parts(), watched, timeout_, body);
}

Group::Message::~Message() {
  if (transfer_) job_->recorder().change(record_.ticket, CallRecord::State::kFailed);
}

void Group::Message::wait() {
  std::shared_ptr<Transfer> transfer;
  {
    std::lock_guard lock(mutex_);
    transfer = transfer_;
  }
  if (!transfer) return;
  job_->recorder().change(record_.ticket, CallRecord::State::kRunning);
  guard(std::chrono::steady_clock::now(), [&](const CallInfo& info) { transfer->wait(info.deadline); });
  job_->recorder().change(record_.ticket, CallRecord::State::kDone);
  std::lock_guard lock(mutex_);
  transfer_.reset();
}

bool Group::Message::is_done() {
  std::lock_guard lock(mutex_);
  return !transfer_ || transfer_->is_done();
}

}  // namespace lockstep::detail
