#include "ui/worker_threads.h"

#include "base/start_thread.h"

namespace lockstep::ui {

WorkerThreads::WorkerThreads(size_t count, const char* purpose) {
  try {
    for (size_t i = 0; i < count; ++i) threads_.push_back(start_thread(purpose, [this] { work(); }));
  } catch (...) {
    stop();
    throw;
  }
}

void WorkerThreads::add(std::function<void()> function) {
  {
    const std::lock_guard lock(mutex_);
    functions_.push_back(std::move(function));
  }
  changed_.notify_one();
}

void WorkerThreads::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
  threads_.clear();
}

void WorkerThreads::work() {
  while (true) {
    std::function<void()> function;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return is_stopping_ || !functions_.empty(); });
      if (is_stopping_) return;
      function = std::move(functions_.front());
      functions_.pop_front();
    }
    function();
  }
}

}  // namespace lockstep::ui
