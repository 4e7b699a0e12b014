#include "comm/work_queue.h"

#include <exception>

#include "base/start_thread.h"

namespace lockstep::detail {

struct WorkQueue::Entry final : Completion {
  explicit Entry(Task task) : task_(std::move(task)) {}

  void execute() {
    try {
      task_();
    } catch (...) {
      error_ = std::current_exception();
    }
    task_ = nullptr;  // lets go of the tensors before anyone is told
  }

  void announce() {
    std::lock_guard lock(mutex_);
    done_ = true;
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

 private:
  Task task_;                 // the executing thread's
  std::exception_ptr error_;  // the executing thread's until done_, then constant
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;  // guarded by mutex_
};

WorkQueue::~WorkQueue() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void WorkQueue::run(const Task& task) {
  {
    std::unique_lock lock(mutex_);
    if (busy_ || !queue_.empty()) {
      lock.unlock();
      submit(task)->wait();
      return;
    }
    busy_ = true;
  }
  struct Release {
    WorkQueue& queue;
    ~Release() {
      std::lock_guard lock(queue.mutex_);
      queue.busy_ = false;
      queue.changed_.notify_all();
    }
  } release{*this};
  task();
}

std::shared_ptr<Completion> WorkQueue::submit(Task task) {
  auto entry = std::make_shared<Entry>(std::move(task));
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
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !busy_ && (!queue_.empty() || closing_); });
    if (queue_.empty()) return;
    auto entry = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    entry->execute();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
    lock.unlock();
    entry->announce();  // after busy_ is false: a waiter's next synchronous call then runs on its own thread
    entry.reset();
    lock.lock();
  }
}

}  // namespace lockstep::detail
