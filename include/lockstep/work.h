#pragma once

#include <chrono>
#include <memory>

#include <lockstep/export.h>

namespace lockstep {

namespace detail {
class Completion;
}

/// An asynchronous call under way. A cheap handle; copies mean the same call.
///
/// Thread-safe. A collective goes on when its Work is dropped; the Work of send_async and recv_async must be kept until
/// it is done, since a message cannot be taken back: on some backends dropping it breaks the group.
class LOCKSTEP_EXPORT Work {
 public:
  explicit Work(std::shared_ptr<detail::Completion> completion);

  /// Returns when the call is done and its result is in place, or throws what went wrong, every time it is called. A
  /// call on CUDA tensors is not waited for: what is put on the current stream from here on runs after it.
  void wait() const;

  /// wait(), and where that does not wait: returns when the device is done with the call. Throws what went wrong until
  /// then.
  void synchronize() const;

  /// Whether synchronize() would return, or throw, at once.
  bool is_done() const;

  /// When the call was done, for measuring; of a message, or on CUDA tensors, when it was waited for. After
  /// synchronize().
  std::chrono::steady_clock::time_point done_at() const;

 private:
  std::shared_ptr<detail::Completion> completion_;  // constant after construction
};

}  // namespace lockstep
