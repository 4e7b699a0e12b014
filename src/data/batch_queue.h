#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/owner_process.h"

namespace lockstep::detail {

/// Prefetches batches on worker threads and returns them in order. Without workers, next() creates each batch itself.
/// Not thread-safe. The workers do not exist in a forked child: the child must not destroy the queue (see
/// OwnedPointer).
class BatchQueue {
 public:
  using Batch = std::shared_ptr<void>;
  /// Creates batch `number`. Called concurrently by different workers, which are numbered from 0; a worker creates one
  /// batch at a time.
  using Make = std::function<Batch(int worker, size_t number)>;
  /// Called once for each batch that a worker made, by the worker or by next(), as soon as next() is to return this
  /// batch. If it throws, next() throws the same exception for this batch.
  using OnNext = std::function<void(void* batch)>;

  /// At most `ahead` batches are in progress or ready. `loader` is the class that owns the queue, for error messages.
  /// Throws SystemError if a thread cannot be created.
  BatchQueue(const char* loader, int workers, size_t ahead, OnNext on_next = {});
  /// Blocks until the workers have finished the batches in progress.
  ~BatchQueue();
  BatchQueue(const BatchQueue&) = delete;
  BatchQueue& operator=(const BatchQueue&) = delete;

  /// Starts a new run of batches 0 to count - 1, created by `make`. Drops the batches of the previous run; workers
  /// first finish the batches of that run that are in progress. Throws UsageError in a forked child, unless there are
  /// no workers.
  void start(size_t count, Make make);

  /// Returns the next batch, or null after the last one. Rethrows the exception that `make` threw for this batch and
  /// then ends the run. Throws UsageError in a forked child, unless there are no workers.
  Batch next();

  /// Total time spent in next() since start().
  std::chrono::nanoseconds waited() const { return waited_; }

 private:
  struct Made {
    Batch batch;
    std::exception_ptr error;
  };
  struct Run;

  Batch take();
  void work(int worker);
  void announce(Made& next) const;
  void stop();
  void check_process() const {
    if (!threads_.empty()) owner_.check(owner_name_.c_str());
  }

  const OwnerProcess owner_{};
  const std::string owner_name_;
  const size_t ahead_;
  const OnNext on_next_;
  std::chrono::nanoseconds waited_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  std::shared_ptr<Run> run_;
  bool is_stopping_ = false;

  std::vector<std::thread> threads_;
};

}  // namespace lockstep::detail
