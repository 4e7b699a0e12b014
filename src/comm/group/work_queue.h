#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "comm/group/completion.h"

namespace lockstep::detail {

/// Runs tasks one at a time in the order they came: on the caller's thread where it can, else on a thread of its own,
/// which starts with the first asynchronous task. Thread-safe.
class WorkQueue {
 public:
  using Lock = std::unique_lock<std::mutex>;
  /// Called with the mutex held, which it lets go of while it works: so that what must be written down when its turn
  /// begins and ends takes no further lock.
  using Task = std::function<void(Lock&)>;

  /// The rank is for errors.
  explicit WorkQueue(std::mutex& mutex, int rank_in_job = 0) : rank_in_job_(rank_in_job), mutex_(mutex) {}
  /// Waits for the tasks that are left: end what they wait for first.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  /// Runs the task after all earlier ones, and returns or throws as it does.
  template <class AnyTask>
  void run(const AnyTask& task) {
    Lock lock(mutex_);
    if (busy_ || !queue_.empty()) {
      lock.unlock();
      return submit(std::ref(task))->wait();
    }
    Turn turn(*this, lock);
    task(lock);
  }

  /// Queues the task; errors come out of the completion.
  std::shared_ptr<Completion> submit(Task task);

  /// Tasks that have not finished.
  size_t pending() const;

 private:
  struct Entry;

  /// From its beginning to its end no other task runs. Both with the mutex held.
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

  const int rank_in_job_;
  std::mutex& mutex_;
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Entry>> queue_;  // guarded by mutex_
  bool busy_ = false;                         // guarded by mutex_: a task runs, here or on a caller's thread
  bool closing_ = false;                      // guarded by mutex_
  std::thread thread_;                        // guarded by mutex_ until closing_
};

}  // namespace lockstep::detail
