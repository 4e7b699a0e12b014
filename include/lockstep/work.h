#pragma once

#include <chrono>
#include <exception>
#include <functional>
#include <memory>

#include <lockstep/export.h>

namespace lockstep {

namespace detail {
class Completion;
}

/// Handle of an asynchronous call. Cheap to copy; copies refer to the same call. Thread-safe.
///
/// A collective continues if its Work is destroyed. Keep the Work of send_async and recv_async until the message is
/// complete: a message cannot be cancelled, and on some backends destroying its Work breaks the group.
class LOCKSTEP_EXPORT Work {
 public:
  explicit Work(std::shared_ptr<detail::Completion> completion);

  /// Blocks until the call is complete and its result is in place. If the call failed, every wait() throws its error.
  /// For a collective on CUDA tensors it does not block: later work on the current stream runs after the collective.
  void wait() const;

  /// Blocks at most this long, until the device has finished the call. Returns whether it has, as std::future::wait_for
  /// does. If not, the call continues and the group stays usable. (CallOptions::timeout is a time limit that breaks the
  /// group.) Throws UsageError if `timeout` is negative.
  [[nodiscard]] bool wait_for(std::chrono::milliseconds timeout) const;

  /// Like wait(), but also blocks until the device has finished the call. Throws any error that occurred before that.
  void synchronize() const;

  /// Returns whether synchronize() would return or throw without blocking.
  bool is_done() const;

  /// Calls `callback` once when the call is complete and its result is in place: with null, or with the error that
  /// synchronize() would throw. If the call is complete already, it runs on the calling thread. Otherwise the callback
  /// of a collective on CPU tensors runs on the group's thread: later asynchronous calls wait for it, and it throws
  /// UsageError if it waits for a call of this group or makes a synchronous call. The callback of a message, or of a
  /// call on CUDA tensors, runs on a separate thread. A callback may start asynchronous calls, but the ranks must
  /// start them in the same order. Exceptions that it throws are logged and otherwise ignored.
  void on_done(std::function<void(std::exception_ptr error)> callback) const;

  /// Returns when the call completed, for measurements. For a message or CUDA tensors, returns when it was first waited
  /// for. Valid after synchronize().
  std::chrono::steady_clock::time_point done_at() const;

 private:
  std::shared_ptr<detail::Completion> completion_;  // constant after construction
};

}  // namespace lockstep
