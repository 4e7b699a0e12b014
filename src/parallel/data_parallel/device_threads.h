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

/// A thread for each device except the first; the caller's thread serves the first. Not thread-safe. The threads do not
/// exist in a forked child: the child must not destroy the object (see OwnedPointer).
class DeviceThreads {
 public:
  explicit DeviceThreads(std::vector<c10::Device> devices);
  ~DeviceThreads();
  DeviceThreads(const DeviceThreads&) = delete;
  DeviceThreads& operator=(const DeviceThreads&) = delete;

  /// Calls `body` concurrently for each of the first `count` devices, with that device current and with the caller's
  /// current streams and thread-local state (gradient mode and so on). Blocks until all calls have returned. Rethrows
  /// the error of the lowest index; if `count` is above 1, the message is prefixed with the index and the device.
  /// Throws UsageError in a forked child, unless `count` is 1.
  void run(size_t count, const std::function<void(size_t)>& body);

 private:
  void serve(size_t index);
  void end();

  const OwnerProcess owner_{};
  const std::vector<c10::Device> devices_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> tasks_;  // guarded by mutex_: by device; empty if idle
  size_t running_ = 0;                        // guarded by mutex_
  bool ends_ = false;                         // guarded by mutex_
  std::vector<std::thread> threads_;          // last: the threads use the members above
};

}  // namespace lockstep
