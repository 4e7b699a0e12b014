#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "comm/group/completion.h"

namespace lockstep::detail {

/// Runs tasks one at a time, in the order of their submission. A synchronous task runs on the caller's thread if the
/// queue is idle. Other tasks run on a thread of the queue, which starts with the first of them. Thread-safe.
class WorkQueue {
 public:
  using Lock = std::unique_lock<std::mutex>;
  /// Called with the mutex locked. The task unlocks the mutex while it works. So bookkeeping at the beginning and the
  /// end of its turn needs no further lock.
  using Task = std::function<void(Lock&)>;

  /// `rank_in_job` is for errors, `activity` for the completions.
  explicit WorkQueue(std::mutex& mutex, int rank_in_job = 0, std::shared_ptr<Activity> activity = nullptr)
      : rank_in_job_(rank_in_job), activity_(std::move(activity)), mutex_(mutex) {}
  /// Waits for the remaining tasks. Before it, wake any task that blocks.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  /// Runs the task after all earlier ones. Blocks until the task is done and rethrows its exception.
  template <class AnyTask>
  void run(const AnyTask& task) {
    refuse_in_callback();
    Lock lock(mutex_);
    if (busy_ || !queue_.empty()) {
      lock.unlock();
      return submit(std::ref(task))->wait();
    }
    Turn turn(*this, lock);
    task(lock);
  }

  /// Queues the task. The completion rethrows its exception.
  std::shared_ptr<Completion> submit(Task task);

  /// The number of unfinished tasks.
  size_t pending() const;

 private:
  struct Entry;

  /// While a Turn exists no other task runs. The constructor requires the mutex; the destructor locks it.
  struct Turn {
    Turn(WorkQueue& queue, Lock& lock) : queue(queue), lock(lock) { queue.busy_ = true; }
    ~Turn() {
      if (!lock.owns_lock()) lock.lock();
      queue.busy_ = false;
      queue.changed_.notify_all();
    }
    WorkQueue& queue;
    Lock& lock;
  };

  void work();
  /// Runs the first task. Requires the mutex and leaves it locked, unless the queue was destroyed: then returns false.
  bool run_first(Lock& lock);
  /// Throws UsageError on a thread that is running a callback of this queue's calls.
  void refuse_in_callback() const;

  const int rank_in_job_;
  const std::shared_ptr<Activity> activity_;
  std::mutex& mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Entry>> queue_;  // guarded by mutex_
  bool busy_ = false;                         // guarded by mutex_: a task runs, on thread_ or on a caller's thread
  bool closing_ = false;                      // guarded by mutex_
  std::thread thread_;                        // guarded by mutex_ until closing_
};

}  // namespace lockstep::detail
