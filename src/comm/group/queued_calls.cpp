#include "comm/group/queued_calls.h"

#include <mutex>
#include <thread>
#include <utility>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/group/completion.h"
#include "comm/group/group.h"

// Calls of a backend that queues on a device (NCCL). Group::execute queues a call, adds it here and returns; the device
// runs the call later. No thread blocks on such a call, so a hang or an error would go unnoticed. Instead:
//
// - The job's thread calls Group::on_tick regularly. It retires finished calls and reports errors of the device to the
//   store. If the oldest call takes long, it asks the other ranks about that call. The answers (Group::on_answers) lead
//   to a MismatchError, a TimeoutError or a warning.
// - An entry keeps the tensors of its call alive until the device is done with them, or until Work::wait() has ordered
//   the caller's stream after the call: LibTorch's allocator reuses memory in stream order.
// - Work::wait() orders only the current stream after the call. Work::synchronize() blocks the host.
// - After an abort await_end() waits until the device has stopped using the tensors, before the caller sees the error.

namespace lockstep::detail {
namespace {

constexpr size_t kMany = 64;  // from this number of calls on, add() retires finished calls
constexpr auto kDevicePause = std::chrono::microseconds(200);
constexpr auto kLongestEnd = std::chrono::milliseconds(500);

/// Treats errors as "not done". Group::retire_queued reports them.
bool is_done(QueuedCall& call) {
  try {
    return call.is_done();
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

void QueuedCalls::add(Entry entry) {
  size_t count = 0;
  {
    std::lock_guard lock(recorder_.mutex());
    entries_.push_back(std::move(entry));
    count = entries_.size();
  }
  if (count >= kMany) retire();
}

// Queries the device and frees tensors without the mutex.
void QueuedCalls::retire() {
  for (;;) {
    std::shared_ptr<QueuedCall> oldest;
    {
      std::lock_guard lock(recorder_.mutex());
      if (entries_.empty()) return;
      oldest = entries_.front().call;
    }
    if (!oldest->is_done()) return;
    std::optional<Entry> done;
    std::lock_guard lock(recorder_.mutex());
    if (entries_.empty() || entries_.front().call != oldest) continue;  // another thread has retired it
    recorder_.change(entries_.front().record.ticket, CallRecord::State::kDone);
    done = std::move(entries_.front());
    entries_.pop_front();
  }
}

void QueuedCalls::release_tensors(const QueuedCall& call) {
  std::shared_ptr<const void> kept;
  std::lock_guard lock(recorder_.mutex());
  for (auto& entry : entries_)
    if (entry.call.get() == &call) kept = std::exchange(entry.kept, nullptr);
}

void QueuedCalls::synchronize() {
  for (const auto& call : calls())
    if (!is_done(*call)) call->synchronize();
}

void QueuedCalls::await_end() {
  const auto deadline = std::chrono::steady_clock::now() + kLongestEnd;
  for (const auto& call : calls())
    while (!is_done(*call)) {
      if (std::chrono::steady_clock::now() > deadline) return;
      std::this_thread::sleep_for(kDevicePause);
    }
}

std::vector<std::shared_ptr<QueuedCall>> QueuedCalls::calls() {
  std::lock_guard lock(recorder_.mutex());
  std::vector<std::shared_ptr<QueuedCall>> result;
  for (const auto& entry : entries_) result.push_back(entry.call);
  return result;
}

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
  parts();  // throws if the group was destroyed
  const ActivityScope blocked(activity_.get(), Activity::Phase::kCommunication);
  if (cpu_group_) cpu_group_->synchronize();
  queue_.run([](WorkQueue::Lock&) {});  // after the calls of the work queue
  queued_.synchronize();
  check_working();
}

void Group::await_room(size_t most) {
  check_process();
  for (;;) {
    retire_queued();
    check_working();
    {
      std::lock_guard lock(mutex_);
      if (queued_.entries().size() < most) return;
    }
    std::this_thread::sleep_for(kPause);
  }
}

void Group::retire_queued() {
  if (failure()) return;
  try {
    queued_.retire();
  } catch (const Error& error) {
    if (auto parts = parts_if_any())
      parts->job->report(*this, membership_.name, own_failure(ErrorKind::kPeer, error.what()));
  }
}

}  // namespace lockstep::detail
