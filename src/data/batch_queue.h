#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/owner_process.h"

namespace lockstep::detail {

/// Makes batches on threads of its own, some ahead of the one who takes them, and hands them out in order. Without
/// threads they are made when they are taken. One thread at a time may call it. A forked child has no such threads: it
/// must not destroy the queue (see OwnedPointer).
class BatchQueue {
 public:
  using Batch = std::shared_ptr<void>;
  /// Called from any of the workers, numbered from 0, for several batches at a time but once for each worker.
  using Make = std::function<Batch(int worker, size_t number)>;

  /// At most `ahead` batches are made or waiting. SystemError when the system has no thread left.
  BatchQueue(int workers, size_t ahead);
  /// Waits for the batches that are being made.
  ~BatchQueue();
  BatchQueue(const BatchQueue&) = delete;
  BatchQueue& operator=(const BatchQueue&) = delete;

  /// From now on batches 0 to count - 1 are handed out, by `make`. What was made before is dropped; a batch that a
  /// worker is busy with is finished first, by that worker.
  void start(size_t count, Make make);

  /// The next batch; none when all have been handed out. What `make` threw for it is thrown here, and then there are no
  /// more. In a forked child both throw UsageError, unless there are no threads.
  Batch next();

  /// How long next() has taken in all since start().
  std::chrono::nanoseconds waited() const { return waited_; }

 private:
  struct Run;

  Batch take();
  void work(int worker);
  void stop();
  void check_process() const {
    if (!threads_.empty()) owner_.check("the process that made the DataLoader");
  }

  const OwnerProcess owner_{};
  const size_t ahead_;
  std::chrono::nanoseconds waited_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::shared_ptr<Run> run_;
  bool is_stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace lockstep::detail
