#pragma once

#include <chrono>

namespace lockstep::detail {

/// What stands behind a Work. Thread-safe.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void wait() = 0;
  /// wait(), and on a device until it is done.
  virtual void synchronize() { wait(); }
  virtual bool is_done() = 0;
  /// When it was, once it is.
  virtual std::chrono::steady_clock::time_point done_at() = 0;
};

}  // namespace lockstep::detail
