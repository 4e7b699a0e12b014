#include "data/batch_queue.h"

#include <dlfcn.h>

#include <algorithm>
#include <exception>
#include <map>
#include <utility>

#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

#include "base/start_thread.h"
#include "base/text.h"

namespace lockstep::detail {
namespace {

// Several workers run in parallel, so none of them should start OpenMP threads. at::set_num_threads would apply to the
// whole process; OpenMP's own function applies to this thread only.
void compute_on_one_thread() {
  at::get_num_threads();  // LibTorch sets the number of threads at the first call on each thread
  if (auto* set = reinterpret_cast<void (*)(int)>(::dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
}

}  // namespace

// The batches of one start(). Guarded by mutex_, except `make`, which is constant.
struct BatchQueue::Run {
  Made made_by(int worker, size_t number) const {
    const at::NoGradGuard no_grad;
    try {
      return {make(worker, number), nullptr};
    } catch (...) {
      return {nullptr, std::current_exception()};
    }
  }

  Make make;
  size_t count = 0;
  size_t next_to_make = 0;
  size_t next_to_take = 0;
  std::map<size_t, Made> made{};
};

BatchQueue::BatchQueue(const char* loader, int workers, size_t ahead, OnNext on_next)
    : owner_name_(text("the process that made the ", loader)), ahead_(ahead), on_next_(std::move(on_next)) {
  const auto purpose = text("a worker of ", loader);
  try {
    for (int worker = 0; worker < workers; ++worker)
      threads_.push_back(start_thread(purpose.c_str(), [this, worker] { work(worker); }));
  } catch (...) {
    stop();
    throw;
  }
}

BatchQueue::~BatchQueue() {
  stop();
}

void BatchQueue::stop() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void BatchQueue::start(size_t count, Make make) {
  check_process();
  auto run = std::make_shared<Run>(Run{std::move(make), count});
  {
    const std::lock_guard lock(mutex_);
    std::swap(run_, run);  // the old run is destroyed after the lock is released
  }
  waited_ = {};
  changed_.notify_all();
}

BatchQueue::Batch BatchQueue::next() {
  check_process();
  const auto begin = std::chrono::steady_clock::now();
  auto batch = take();
  waited_ += std::chrono::steady_clock::now() - begin;
  return batch;
}

BatchQueue::Batch BatchQueue::take() {
  std::unique_lock lock(mutex_);
  if (!run_ || run_->next_to_take == run_->count) return nullptr;
  Made made;
  if (threads_.empty()) {
    made = run_->made_by(0, run_->next_to_take);
  } else {
    changed_.wait(lock, [&] { return run_->made.contains(run_->next_to_take); });
    made = std::move(run_->made.extract(run_->next_to_take).mapped());
  }
  ++run_->next_to_take;
  if (made.error)
    run_ = nullptr;
  else if (const auto next = run_->made.find(run_->next_to_take); next != run_->made.end())
    announce(next->second);
  lock.unlock();
  changed_.notify_all();
  if (made.error) std::rethrow_exception(made.error);
  return made.batch;
}

void BatchQueue::announce(Made& next) const {
  if (!on_next_ || !next.batch) return;
  try {
    on_next_(next.batch.get());
  } catch (...) {
    next = {nullptr, std::current_exception()};
  }
}

void BatchQueue::work(int worker) {
  compute_on_one_thread();
  std::unique_lock lock(mutex_);
  const auto has_work = [&] { return run_ && run_->next_to_make < std::min(run_->count, run_->next_to_take + ahead_); };
  for (;;) {
    changed_.wait(lock, [&] { return is_stopping_ || has_work(); });
    if (is_stopping_) return;
    auto run = run_;
    const size_t number = run->next_to_make++;
    lock.unlock();
    auto made = run->made_by(worker, number);
    lock.lock();
    if (run == run_ && number == run->next_to_take) {  // next() returns no other batch before this one
      lock.unlock();
      announce(made);
      lock.lock();
    }
    if (run == run_) run->made.emplace(number, std::move(made));
    changed_.notify_all();
  }
}

}  // namespace lockstep::detail
