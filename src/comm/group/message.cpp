#include "comm/group/message.h"

#include <utility>

#include <lockstep/error.h>

#include "base/deadline.h"
#include "base/error.h"
#include "base/text.h"

namespace lockstep::detail {

Message::Message(std::shared_ptr<Group> group, const MessageRoute& route, Fingerprint call, const CallOptions& options,
                 const Start& start)
    : group_(std::move(group)), parts_(group_->connection().parts()), timeout_(group_->timeout_of(options)) {
  record_ = {0, group_->membership().name, {0, route}, std::move(call), options.site};
  record_.state = CallRecord::State::kPosted;
  begin(route, start);
  if (route.from == group_->membership().rank) group_->messages().announce(route);
}

void Message::begin(const MessageRoute& route, const Start& start) {
  auto& recorder = *group_->recorder();
  WorkQueue::Lock lock(recorder.mutex());
  record_.call_id.number = group_->messages().begin(route);
  record_.ticket = recorder.begin(record_);
  CallWatch::Call watched(group_->watch(), lock, record_, record_.started);
  auto& backend = group_->connection().open_backend();
  lock.unlock();
  watched.check();
  try {
    transfer_ = start(backend, watched.info(timeout_).fingerprint);
  } catch (const UsageError&) {  // nothing was sent, so the group stays usable
    lock.lock();
    group_->messages().undo_begin(route);
    const int rank = group_->membership().rank;
    rethrow_with_prefix(std::current_exception(), text("rank ", rank, ": ", describe(record_.call), ": "), "", rank);
  } catch (...) {
    watched.fail(timeout_);
  }
  watched.end(transfer_ ? CallRecord::State::kPosted : CallRecord::State::kDone);  // an empty tensor is not sent
}

Message::~Message() {
  if (!transfer_) return;
  std::lock_guard lock(group_->recorder()->mutex());
  group_->recorder()->change(record_.ticket, CallRecord::State::kFailed);
}

std::shared_ptr<Transfer> Message::transfer() {
  std::lock_guard lock(mutex_);
  return transfer_;
}

void Message::wait() {
  const auto transfer = this->transfer();
  if (!transfer) return;
  {
    WorkQueue::Lock lock(group_->recorder()->mutex());
    group_->recorder()->change(record_.ticket, CallRecord::State::kRunning);
    CallWatch::Call watched(group_->watch(), lock, record_);
    group_->connection().open_backend();  // throws if the group was destroyed
    lock.unlock();
    watched.check();
    try {
      transfer->wait(watched.info(timeout_).deadline);
    } catch (...) {
      watched.fail(timeout_);
    }
    watched.end(CallRecord::State::kDone);
  }
  std::lock_guard lock(mutex_);
  transfer_.reset();
}

// A caller that polls need not call wait() afterwards, so success is recorded here. Errors are left to wait(), which
// throws them, or to the destructor, which records them.
bool Message::is_done() {
  const auto transfer = this->transfer();
  if (!transfer) return true;
  try {
    if (!transfer->is_done()) return group_->failure() != nullptr;
    transfer->wait(deadline_after(timeout_));  // returns or throws at once
  } catch (const std::exception&) {
    return true;
  }
  {
    std::lock_guard lock(group_->recorder()->mutex());
    group_->recorder()->change(record_.ticket, CallRecord::State::kDone);
  }
  std::lock_guard lock(mutex_);
  transfer_.reset();
  return true;
}

}  // namespace lockstep::detail
