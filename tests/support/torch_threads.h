#pragma once

#include <mutex>
#include <set>
#include <thread>

#include <ATen/Parallel.h>

namespace lockstep {

/// Sets the number of LibTorch's threads while it lives, and counts those that note themselves.
class TorchThreads {
 public:
  explicit TorchThreads(int count) : before_(at::get_num_threads()) { at::set_num_threads(count); }
  ~TorchThreads() { at::set_num_threads(before_); }
  TorchThreads(const TorchThreads&) = delete;
  TorchThreads& operator=(const TorchThreads&) = delete;

  void note() {
    std::lock_guard lock(mutex_);
    seen_.insert(std::this_thread::get_id());
  }
  size_t noted() const {
    std::lock_guard lock(mutex_);
    return seen_.size();
  }

 private:
  int before_;
  mutable std::mutex mutex_{};
  std::set<std::thread::id> seen_{};
};

}  // namespace lockstep
