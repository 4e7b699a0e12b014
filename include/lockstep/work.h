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

  /// Returns when the call is done and its result is in place, or throws what went wrong, every time it is called.
  void wait() const;

  /// Whether wait() would return, or throw, at once.
  bool is_done() const;

  /// When the call was done, for measuring; of a message, when that was found out. After wait().
  std::chrono::steady_clock::time_point done_at() const;

 private:
  std::shared_ptr<detail::Completion> completion_;  // constant after construction
};

}  // namespace lockstep
