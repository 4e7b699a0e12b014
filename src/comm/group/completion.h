#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "base/owner_process.h"
#include "base/text.h"
#include "comm/watch/activity.h"

namespace lockstep::detail {

/// The implementation of a Work. Created by make_shared_owned, because other threads may wait for it. Thread-safe.
class Completion : public std::enable_shared_from_this<Completion> {
 public:
  using Callback = std::function<void(std::exception_ptr)>;

  /// `activity` counts the time in which the training thread waits; may be null.
  Completion(int rank_in_job, std::shared_ptr<Activity> activity)
      : rank_in_job_(rank_in_job), activity_(std::move(activity)) {}
  virtual ~Completion() = default;
  virtual void wait() = 0;
  /// Like wait(), but also blocks until the device is done.
  virtual void synchronize() { wait(); }
  virtual bool is_done() = 0;
  /// Blocks until is_done() returns true, at most until the deadline. Returns is_done().
  virtual bool wait_until(std::chrono::steady_clock::time_point deadline);
  /// Calls the callback as described at Work::on_done. Throws SystemError if it needs a thread and none can be started.
  virtual void on_done(Callback callback);
  /// When the call was done. Valid once it is done.
  virtual std::chrono::steady_clock::time_point done_at() = 0;

  /// Waits for the result, then calls the callback with the error if there is one.
  void call_back(const Callback& callback) noexcept;

  Activity* activity() const { return activity_.get(); }

  /// Throws UsageError in a forked child.
  void check_process() const {
    if (!owner_.is_this()) owner_.refuse(text("rank ", rank_in_job_, "'s process"));
  }

 protected:
  /// Blocks until the result is in place, on a thread that runs callbacks. Throws the error of the call.
  virtual void await_result() { synchronize(); }

 private:
  const OwnerProcess owner_{};
  const int rank_in_job_;
  const std::shared_ptr<Activity> activity_;
};

}  // namespace lockstep::detail
