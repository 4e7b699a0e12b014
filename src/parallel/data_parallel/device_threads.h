#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include <c10/core/Device.h>

#include "base/owner_process.h"

namespace lockstep {

/// A thread for each device but the first, whose work is the caller's. Not thread-safe. A forked child has no such
/// threads: it must not destroy the object (see OwnedPointer).
class DeviceThreads {
 public:
  explicit DeviceThreads(std::vector<c10::Device> devices);
  ~DeviceThreads();
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// Calls the body for each of the first `count` devices at the same time: each with its device current, and the
  /// caller's streams, gradient mode and the like. Returns when all are done, or throws what the first of them threw,
  /// with its number before it where there are several. UsageError in a forked child, unless `count` is 1.
  void run(size_t count, const std::function<void(size_t)>& body);

 private:
  void serve(size_t index);
  void end();

  const OwnerProcess owner_{};
  const std::vector<c10::Device> devices_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> tasks_;  // guarded by mutex_: by device; empty when there is nothing to do
  size_t running_ = 0;                        // guarded by mutex_
  bool ends_ = false;                         // guarded by mutex_
  std::vector<std::thread> threads_;          // last: they use all of the above
};

}  // namespace lockstep
