#include "comm/group/work_queue.h"

#include <exception>
#include <utility>
#include <vector>

#include <lockstep/error.h>

#include "base/start_thread.h"

namespace lockstep::detail {
namespace {

thread_local const WorkQueue* callbacks_of = nullptr;  // the queue whose callbacks this thread is running

}  // namespace

struct WorkQueue::Entry final : Completion {
  Entry(const WorkQueue& queue, Task task)
      : Completion(queue.rank_in_job_, queue.activity_), queue_(queue), task_(std::move(task)) {}

  void execute(Lock& lock) {
    try {
      task_(lock);
    } catch (...) {
      error_ = std::current_exception();
    }
    if (lock.owns_lock()) lock.unlock();
    task_ = nullptr;  // releases the tensors before a waiter continues
  }

  /// Returns whether the queue still exists: a callback may destroy the last handle of the group.
  bool announce() {
    std::vector<Callback> callbacks;
    {
      std::lock_guard lock(mutex_);
      done_ = true;
      done_at_ = std::chrono::steady_clock::now();
      changed_.notify_all();
      callbacks.swap(callbacks_);
    }
    if (callbacks.empty()) return true;
    const auto* outer = std::exchange(callbacks_of, &queue_);
    for (const auto& callback : callbacks) call_back(callback);
    callbacks.clear();
    const bool queue_exists = callbacks_of != nullptr;
    if (queue_exists) callbacks_of = outer;
    return queue_exists;
  }

  void wait() override {
    std::unique_lock lock(mutex_);
    if (!done_) queue_.refuse_in_callback();
    changed_.wait(lock, [&] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }

  bool wait_until(std::chrono::steady_clock::time_point deadline) override {
    std::unique_lock lock(mutex_);
    if (!done_) queue_.refuse_in_callback();
    return changed_.wait_until(lock, deadline, [&] { return done_; });
  }

  void on_done(Callback callback) override {
    {
      std::lock_guard lock(mutex_);
      if (!done_) return callbacks_.push_back(std::move(callback));
    }
    call_back(callback);
  }

  bool is_done() override {
    std::lock_guard lock(mutex_);
    return done_;
  }

  std::chrono::steady_clock::time_point done_at() override {
    std::lock_guard lock(mutex_);
    return done_at_;
  }

 private:
  const WorkQueue& queue_;    // valid until done_
  Task task_;                 // used only by the executing thread
  std::exception_ptr error_;  // used only by the executing thread until done_, then constant
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;                                // guarded by mutex_
  std::chrono::steady_clock::time_point done_at_{};  // guarded by mutex_
  std::vector<Callback> callbacks_;                  // guarded by mutex_
};

WorkQueue::~WorkQueue() {
  if (thread_.get_id() == std::this_thread::get_id()) {  // in a callback, which had the last handle of the group
    Lock lock(mutex_);
    while (!queue_.empty()) run_first(lock);
    thread_.detach();
    callbacks_of = nullptr;
    return;
  }
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Completion> WorkQueue::submit(Task task) {
  auto entry = make_shared_owned<Entry>(*this, std::move(task));
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_thread("asynchronous calls", [this] { work(); });
  queue_.push_back(entry);
  changed_.notify_all();
  return entry;
}

// The thread that runs callbacks is the one that would have to run the call.
void WorkQueue::refuse_in_callback() const {
  if (callbacks_of == this)
    throw UsageError(rank_in_job_,
                     "a callback of Work::on_done waits for a call of the same group, which would never return; make "
                     "asynchronous calls there, or wait on another thread");
}

size_t WorkQueue::pending() const {
  std::lock_guard lock(mutex_);
  return queue_.size() + (busy_ ? 1 : 0);
}

void WorkQueue::work() {
  Lock lock(mutex_);
  do {
    changed_.wait(lock, [&] { return !busy_ && (!queue_.empty() || closing_); });
    if (queue_.empty()) return;
  } while (run_first(lock));
}

bool WorkQueue::run_first(Lock& lock) {
  auto entry = std::move(queue_.front());
  queue_.pop_front();
  {
    Turn turn(*this, lock);
    entry->execute(lock);
  }
  lock.unlock();
  // After the turn: the next synchronous call of a waiter then runs on the waiter's thread.
  if (!entry->announce()) return false;
  entry.reset();
  lock.lock();
  return true;
}

}  // namespace lockstep::detail
