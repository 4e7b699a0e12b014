#pragma once

#include <chrono>

#include "base/owner_process.h"
#include "base/text.h"

namespace lockstep::detail {

/// What stands behind a Work. Made by make_shared_owned, since other threads may wait for it. Thread-safe.
class Completion {
 public:
  explicit Completion(int rank_in_job) : rank_in_job_(rank_in_job) {}
  virtual ~Completion() = default;
  virtual void wait() = 0;
  /// wait(), and on a device until it is done.
  virtual void synchronize() { wait(); }
  virtual bool is_done() = 0;
  /// When it was, once it is.
  virtual std::chrono::steady_clock::time_point done_at() = 0;

  /// UsageError in a forked child.
  void check_process() const {
    if (!owner_.is_this()) owner_.refuse(text("rank ", rank_in_job_, "'s process"));
  }

 private:
  const OwnerProcess owner_{};
  const int rank_in_job_;
};

}  // namespace lockstep::detail
