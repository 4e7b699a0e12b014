#pragma once

#include <chrono>

#include "base/owner_process.h"
#include "base/text.h"

namespace lockstep::detail {

/// The implementation of a Work. Created by make_shared_owned, because other threads may wait for it. Thread-safe.
class Completion {
 public:
  explicit Completion(int rank_in_job) : rank_in_job_(rank_in_job) {}
  virtual ~Completion() = default;
  virtual void wait() = 0;
  /// Like wait(), but also blocks until the device is done.
  virtual void synchronize() { wait(); }
  virtual bool is_done() = 0;
  /// When the call was done. Valid once it is done.
  virtual std::chrono::steady_clock::time_point done_at() = 0;

  /// Throws UsageError in a forked child.
  void check_process() const {
    if (!owner_.is_this()) owner_.refuse(text("rank ", rank_in_job_, "'s process"));
  }

 private:
  const OwnerProcess owner_{};
  const int rank_in_job_;
};

}  // namespace lockstep::detail
