#include "comm/group/work_queue.h"

#include <exception>

#include "base/start_thread.h"

namespace lockstep::detail {

struct WorkQueue::Entry final : Completion {
  Entry(int rank_in_job, Task task) : Completion(rank_in_job), task_(std::move(task)) {}

  void execute(Lock& lock) {
    try {
      task_(lock);
    } catch (...) {
      error_ = std::current_exception();
    }
    if (lock.owns_lock()) lock.unlock();
    task_ = nullptr;  // releases the tensors before a waiter continues
  }

  void announce() {
    std::lock_guard lock(mutex_);
    done_ = true;
    done_at_ = std::chrono::steady_clock::now();
    changed_.notify_all();
  }

  void wait() override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
    if (error_) std::rethrow_exception(error_);
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
  Task task_;                 // used only by the executing thread
  std::exception_ptr error_;  // used only by the executing thread until done_, then constant
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;                                // guarded by mutex_
  std::chrono::steady_clock::time_point done_at_{};  // guarded by mutex_
};

WorkQueue::~WorkQueue() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

std::shared_ptr<Completion> WorkQueue::submit(Task task) {
  auto entry = make_shared_owned<Entry>(rank_in_job_, std::move(task));
  std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = start_thread("asynchronous calls", [this] { work(); });
  queue_.push_back(entry);
  changed_.notify_all();
  return entry;
}

size_t WorkQueue::pending() const {
  std::lock_guard lock(mutex_);
  return queue_.size() + (busy_ ? 1 : 0);
}

void WorkQueue::work() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !busy_ && (!queue_.empty() || closing_); });
    if (queue_.empty()) return;
    auto entry = std::move(queue_.front());
    queue_.pop_front();
    {
      Turn turn(*this, lock);
      entry->execute(lock);
    }
    lock.unlock();
    entry->announce();  // after the turn: the next synchronous call of a waiter then runs on the waiter's thread
    entry.reset();
    lock.lock();
  }
}

}  // namespace lockstep::detail
