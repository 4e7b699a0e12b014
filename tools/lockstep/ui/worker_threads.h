#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace lockstep::ui {

/// Threads that call functions in the order in which they are added.
class WorkerThreads {
 public:
  /// Throws SystemError, with the purpose and the remedy, if no thread can be started.
  WorkerThreads(size_t count, const char* purpose);
  ~WorkerThreads() { stop(); }
  WorkerThreads(const WorkerThreads&) = delete;
  WorkerThreads& operator=(const WorkerThreads&) = delete;

  /// Returns at once. The function must not throw. Thread-safe.
  void add(std::function<void()> function);

  /// Blocks until the functions that have been called return. Functions that have not been called are dropped.
  void stop();

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> functions_;  // guarded by mutex_
  bool is_stopping_ = false;                     // guarded by mutex_
  std::vector<std::thread> threads_;             // used by the owner only
};

}  // namespace lockstep::ui
