#include "backends/threads/thread_group.h"

#include <algorithm>
#include <cstring>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::threads {

ThreadGroup::ThreadGroup(int size) : rounds_(size, 0), published_(size, nullptr), fingerprints_(size, 0) {}

void ThreadGroup::share(int rank, const void* object, const CallInfo& call, const std::function<void()>& use) {
  published_[rank] = object;
  fingerprints_[rank] = call.fingerprint;
  std::unique_lock lock(mutex_);
  barrier(lock, rank, call.deadline);
  if (std::any_of(fingerprints_.begin(), fingerprints_.end(), [&](uint64_t f) { return f != call.fingerprint; })) {
    if (!cause_) cause_ = std::make_exception_ptr(MismatchError("the ranks make different calls"));
    leave(lock);
  }
  ++users_;
  lock.unlock();
  std::exception_ptr error;
  try {
    use();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  --users_;
  if (error && !cause_) cause_ = error;
  barrier(lock, rank, call.deadline);
}

void ThreadGroup::barrier(std::unique_lock<std::mutex>& lock, int rank, Deadline deadline) {
  uint64_t own_round = ++rounds_[rank];
  changed_.notify_all();
  auto is_late = [&](uint64_t round) { return round < own_round; };
  bool in_time = changed_.wait_until(lock, deadline,
                                     [&] { return cause_ || std::none_of(rounds_.begin(), rounds_.end(), is_late); });
  if (!in_time && !cause_) {
    std::vector<size_t> late;
    for (size_t r = 0; r < rounds_.size(); ++r)
      if (is_late(rounds_[r])) late.push_back(r);
    cause_ =
        std::make_exception_ptr(TimeoutError(text("timed out: rank ", enumerate(late), " did not reach this call")));
    changed_.notify_all();
  }
  if (cause_) leave(lock);
}

// After this rank has left, its memory may be freed. So it first waits until no rank runs `use`. Once cause_ is set, no
// rank starts to run `use`.
void ThreadGroup::leave(std::unique_lock<std::mutex>& lock) {
  changed_.notify_all();
  changed_.wait(lock, [&] { return users_ == 0; });
  std::rethrow_exception(cause_);
}

void ThreadGroup::post_send(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end) {
  std::lock_guard lock(mutex_);
  mailboxes_[{from, to, tag}].sends.push_back(end);
  deliver({from, to, tag});
}

void ThreadGroup::post_recv(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end) {
  std::lock_guard lock(mutex_);
  mailboxes_[{from, to, tag}].receives.push_back(end);
  deliver({from, to, tag});
}

void ThreadGroup::deliver(const Channel& channel) {
  auto& box = mailboxes_[channel];
  while (!box.sends.empty() && !box.receives.empty()) {
    auto sent = box.sends.front();
    auto received = box.receives.front();
    box.sends.pop_front();
    box.receives.pop_front();
    if (sent->bytes == received->bytes && sent->fingerprint == received->fingerprint) {
      std::memcpy(received->data, sent->data, static_cast<size_t>(sent->bytes));
    } else {
      auto [from, to, tag] = channel;
      sent->error = received->error = std::make_exception_ptr(MismatchError(
          text("rank ", from, " sends ", sent->bytes, " bytes with tag ", tag, ", but rank ", to, " expects ",
               received->bytes, sent->bytes == received->bytes ? " bytes of a different dtype" : " bytes")));
    }
    sent->is_done = received->is_done = true;
    changed_.notify_all();
  }
  if (box.sends.empty() && box.receives.empty()) mailboxes_.erase(channel);
}

void ThreadGroup::wait(const MessageEnd& end, int peer, Deadline deadline) {
  std::unique_lock lock(mutex_);
  bool in_time = changed_.wait_until(lock, deadline, [&] { return end.is_done || cause_; });
  if (end.error) std::rethrow_exception(end.error);
  if (end.is_done) return;
  if (cause_) std::rethrow_exception(cause_);
  if (!in_time) throw TimeoutError(text("timed out: rank ", peer, " did not post its end of this message"));
}

bool ThreadGroup::is_done(const MessageEnd& end) {
  std::lock_guard lock(mutex_);
  return end.is_done || cause_;
}

void ThreadGroup::withdraw(int from, int to, uint32_t tag, const std::shared_ptr<MessageEnd>& end) {
  std::lock_guard lock(mutex_);
  auto found = mailboxes_.find({from, to, tag});
  if (found == mailboxes_.end()) return;
  std::erase(found->second.sends, end);
  std::erase(found->second.receives, end);
  if (found->second.sends.empty() && found->second.receives.empty()) mailboxes_.erase(found);
}

void ThreadGroup::abort(std::exception_ptr cause) {
  std::lock_guard lock(mutex_);
  if (!cause_) cause_ = cause;
  changed_.notify_all();
}

}  // namespace lockstep::threads
