#include "parallel/device_threads.h"

#include <optional>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/rethrow.h"
#include "base/start_thread.h"
#include "base/text.h"

namespace lockstep {
namespace {

std::optional<c10::Stream> current_stream(c10::Device device) {
  if (device.is_cpu()) return {};
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

DeviceThreads::DeviceThreads(std::vector<c10::Device> devices) : devices_(std::move(devices)), tasks_(devices_.size()) {
  for (size_t index = 1; index < devices_.size(); ++index)
    threads_.push_back(start_thread("a replica", [this, index] { serve(index); }));
}

DeviceThreads::~DeviceThreads() {
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
  std::vector<std::exception_ptr> errors(count);
  const auto attempt = [&](size_t index, const std::optional<c10::Stream>& stream) {
    try {
      c10::OptionalStreamGuard guard;
      if (stream) guard.reset_stream(*stream);
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
      tasks_[index] = [&, index, stream = current_stream(devices_[index])] {
        const at::ThreadLocalStateGuard guard(state);
        attempt(index, stream);
      };
  }
  changed_.notify_all();
  attempt(0, current_stream(devices_[0]));
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return running_ == 0; });
  }
  for (size_t index = 0; index < count; ++index)
    if (errors[index])
      rethrow_with_prefix(errors[index], text("DataParallel: replica ", index, " on ", devices_[index], ": "));
}

}  // namespace lockstep
