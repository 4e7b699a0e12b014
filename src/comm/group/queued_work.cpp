#include <thread>
#include <utility>

#include <lockstep/error.h>

#include "comm/group/completion.h"
#include "comm/group/group.h"

// The calls of a group whose backend queues them on a device.

namespace lockstep::detail {
namespace {

constexpr auto kPause = std::chrono::microseconds(20);

}  // namespace

/// The Work of a call on a device.
class Group::QueuedWork final : public Completion {
 public:
  /// `kept` holds the tensors of the call.
  QueuedWork(std::shared_ptr<Group> group, std::shared_ptr<QueuedCall> call, std::shared_ptr<const void> kept)
      : Completion(group->rank_in_job_, group->activity_),
        group_(std::move(group)),
        call_(std::move(call)),
        kept_(std::move(kept)) {}

  void wait() override {
    order();
    note_done();
  }

  void synchronize() override {
    order();
    if (call_) call_->synchronize();
    group_->check_working();
    note_done();
  }

  // Neither orders a stream nor releases tensors: the stream of this thread has nothing to do with the call.
  void await_result() override {
    wait_until(std::chrono::steady_clock::time_point::max());
    group_->check_working();
    note_done();
  }

  bool is_done() override {
    try {
      return !call_ || group_->failure() || call_->is_done();
    } catch (const Error&) {
      return true;  // synchronize() throws the error
    }
  }

  std::chrono::steady_clock::time_point done_at() override {
    std::lock_guard lock(mutex_);
    return done_at_;
  }

 private:
  void order() {
    group_->check_working();
    if (!call_) return;
    call_->order_current_stream();
    group_->queued_.release_tensors(*call_);
    std::shared_ptr<const void> kept;  // destroyed after the mutex is released
    std::lock_guard lock(mutex_);
    kept = std::exchange(kept_, nullptr);
  }

  void note_done() {
    std::lock_guard lock(mutex_);
    if (done_at_ == std::chrono::steady_clock::time_point()) done_at_ = std::chrono::steady_clock::now();
  }

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<QueuedCall> call_;
  std::mutex mutex_;
  std::shared_ptr<const void> kept_;                 // guarded by mutex_: also set if the group does not track the call
  std::chrono::steady_clock::time_point done_at_{};  // guarded by mutex_
};

// Runs on the caller's thread: queueing does not wait for other ranks.
Work Group::queue(const std::shared_ptr<const Call>& call, const CallOptions& options,
                  std::chrono::milliseconds timeout) {
  std::shared_ptr<QueuedCall> queued;
  queue_.run(
      [&](WorkQueue::Lock& lock) { queued = execute(lock, *call, options, timeout, Backend::Stream::kOwn, call); });
  return Work(make_shared_owned<QueuedWork>(shared_from_this(), std::move(queued), call));
}

void Group::synchronize() {
  job();  // throws if the group was destroyed
  const ActivityScope blocked(activity_.get(), Activity::Phase::kCommunication);
  if (cpu_group_) cpu_group_->synchronize();
  queue_.run([](WorkQueue::Lock&) {});  // after the calls of the work queue
  queued_.synchronize();
  check_working();
}

void Group::await_room(size_t most) {
  check_process();
  for (;;) {
    watch_.retire_queued();
    check_working();
    {
      std::lock_guard lock(mutex_);
      if (queued_.entries().size() < most) return;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace lockstep::detail
