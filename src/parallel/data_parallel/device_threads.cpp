#include "parallel/data_parallel/device_threads.h"

#include <algorithm>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <lockstep/error.h>

#include "base/error.h"
#include "base/start_thread.h"
#include "base/text.h"

namespace lockstep {
namespace {

/// Returns the current streams of all devices except CPUs.
std::vector<c10::Stream> current_streams(const std::vector<c10::Device>& devices) {
  std::vector<c10::Stream> result;
  for (const auto device : devices) {
    if (device.is_cpu()) continue;
    const auto stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (std::find(result.begin(), result.end(), stream) == result.end()) result.push_back(stream);
  }
  return result;
}

}  // namespace

DeviceThreads::DeviceThreads(std::vector<c10::Device> devices) : devices_(std::move(devices)), tasks_(devices_.size()) {
  try {
    for (size_t index = 1; index < devices_.size(); ++index)
      threads_.push_back(start_thread("a replica", [this, index] { serve(index); }));
  } catch (const Error&) {
    end();
    throw;
  }
}

DeviceThreads::~DeviceThreads() {
  end();
}

void DeviceThreads::end() {
  {
    std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void DeviceThreads::serve(size_t index) {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return ends_ || tasks_[index]; });
    if (ends_) return;
    auto task = std::exchange(tasks_[index], nullptr);
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    --running_;
    changed_.notify_all();
  }
}

void DeviceThreads::run(size_t count, const std::function<void(size_t)>& body) {
  if (count == 1) return body(0);
  owner_.check("the process that made the DataParallel");
  std::vector<std::exception_ptr> errors(count);
  const auto streams = current_streams(devices_);
  const auto attempt = [&](size_t index) {
    try {
      const c10::MultiStreamGuard stream_guard(streams);
      c10::OptionalDeviceGuard device_guard;
      if (!devices_[index].is_cpu()) device_guard.reset_device(devices_[index]);
      body(index);
    } catch (...) {
      errors[index] = std::current_exception();
    }
  };
  const at::ThreadLocalState state;
  {
    std::lock_guard lock(mutex_);
    running_ = count - 1;
    for (size_t index = 1; index < count; ++index)
      tasks_[index] = [&, index] {
        const at::ThreadLocalStateGuard guard(state);
        attempt(index);
      };
  }
  changed_.notify_all();
  attempt(0);
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0; });
  }
  for (size_t index = 0; index < count; ++index)
    if (errors[index])
      rethrow_with_prefix(errors[index], text("DataParallel: replica ", index, " on ", devices_[index], ": "));
}

}  // namespace lockstep
