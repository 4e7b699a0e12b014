#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace lockstep::detail {

/// How the training thread of a rank spends its time. The training thread is in exactly one phase at any time, so the
/// times of all phases add up to the time since start(). Nothing is measured before start().
///
/// The training thread writes, any thread may read. Values are relaxed atomics: a phase change costs two clock reads
/// and a reader may see a change partly, which shifts a few microseconds between two phases.
class Activity {
 public:
  enum class Phase { kOther, kForward, kBackward, kCommunication, kData };
  static constexpr size_t kPhases = 5;
  using Clock = std::chrono::steady_clock;

  /// The calling thread is the training thread from now on, and in the phase kOther.
  void start() {
    since_.store(now(), std::memory_order_relaxed);
    phase_.store(Phase::kOther, std::memory_order_relaxed);
    owner_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  /// Nothing is measured any more.
  void stop() {
    owner_.store(std::thread::id(), std::memory_order_relaxed);
    thread_.store(std::thread::id(), std::memory_order_relaxed);
  }
  /// The training thread begins a step: ends the phase of a step that an exception has interrupted.
  void begin_step() {
    if (owner_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return start();
    thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    enter(Phase::kOther);
  }

  /// The calling thread acts as the training thread, which blocks until end_backward(): autograd runs the backward of a
  /// GPU on a separate thread. begin_backward() and end_backward() do nothing if nothing is measured.
  void begin_backward() {
    if (owner_.load(std::memory_order_relaxed) == std::thread::id()) return;
    thread_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    enter(Phase::kBackward);
  }
  void end_backward() {
    const auto owner = owner_.load(std::memory_order_relaxed);
    if (owner == std::thread::id()) return;
    enter(Phase::kOther);
    thread_.store(owner, std::memory_order_relaxed);
  }

  bool is_training_thread() const { return thread_.load(std::memory_order_relaxed) == std::this_thread::get_id(); }

  /// Changes the phase of the training thread. Returns the phase before. Call it on the training thread.
  Phase enter(Phase phase) {
    const auto before = phase_.load(std::memory_order_relaxed);
    const auto at = now();
    auto& counter = nanoseconds_[static_cast<size_t>(before)];
    counter.store(counter.load(std::memory_order_relaxed) + at - since_.load(std::memory_order_relaxed),
                  std::memory_order_relaxed);
    since_.store(at, std::memory_order_relaxed);
    phase_.store(phase, std::memory_order_relaxed);
    return before;
  }

  /// The time in each phase so far, the current phase included.
  struct Times {
    std::array<int64_t, kPhases> nanoseconds{};
    Phase phase = Phase::kOther;
    Clock::duration in_phase{};  // since the last change

    int64_t operator[](Phase which) const { return nanoseconds[static_cast<size_t>(which)]; }
  };
  Times times() const {
    Times times;
    for (size_t i = 0; i < kPhases; ++i) times.nanoseconds[i] = nanoseconds_[i].load(std::memory_order_relaxed);
    times.phase = phase_.load(std::memory_order_relaxed);
    if (thread_.load(std::memory_order_relaxed) == std::thread::id()) return times;
    const auto passed = std::max<int64_t>(0, now() - since_.load(std::memory_order_relaxed));
    times.nanoseconds[static_cast<size_t>(times.phase)] += passed;
    times.in_phase = std::chrono::nanoseconds(passed);
    return times;
  }

  /// Calls the function when a call of a group throws because the group is broken, before it throws. Null: none. Blocks
  /// while the old function runs.
  void set_failure_hook(std::function<void()> hook) {
    std::lock_guard lock(mutex_);
    failure_hook_ = std::move(hook);
  }
  void report_failure() {
    std::lock_guard lock(mutex_);
    if (failure_hook_) failure_hook_();
  }

 private:
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
  }

  std::atomic<std::thread::id> owner_{};   // the thread of start(); none: nothing is measured
  std::atomic<std::thread::id> thread_{};  // the training thread; differs from owner_ during the backward of a GPU
  std::atomic<Phase> phase_{Phase::kOther};
  std::atomic<int64_t> since_{0};  // nanoseconds of the clock at the last change
  std::array<std::atomic<int64_t>, kPhases> nanoseconds_{};
  std::mutex mutex_;
  std::function<void()> failure_hook_;  // guarded by mutex_
};

/// Calls end_backward() when the scope is left.
class EndOfBackward {
 public:
  explicit EndOfBackward(Activity& activity) : activity_(activity) {}
  ~EndOfBackward() { activity_.end_backward(); }
  EndOfBackward(const EndOfBackward&) = delete;
  EndOfBackward& operator=(const EndOfBackward&) = delete;

 private:
  Activity& activity_;
};

/// The training thread is in a phase while this object exists. Does nothing on other threads.
class ActivityScope {
 public:
  ActivityScope(Activity* activity, Activity::Phase phase)
      : activity_(activity && activity->is_training_thread() ? activity : nullptr) {
    if (activity_) before_ = activity_->enter(phase);
  }
  ~ActivityScope() {
    if (activity_ && activity_->is_training_thread()) activity_->enter(before_);
  }
  ActivityScope(const ActivityScope&) = delete;
  ActivityScope& operator=(const ActivityScope&) = delete;

 private:
  Activity* const activity_;
  Activity::Phase before_ = Activity::Phase::kOther;
};

}  // namespace lockstep::detail
