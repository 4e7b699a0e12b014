#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/wait_notice.h"

namespace lockstep::detail {

/// Schedules checks of a call that takes long: after 300 ms, then with doubling pauses up to 30 s, and at the deadline.
/// Also decides when to print that the call is waiting. Not thread-safe.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Backoff(Clock::time_point begin, Clock::time_point deadline = Clock::time_point::max())
      : next_poll_(begin + pause_), deadline_(deadline), notice_(begin) {}

  /// Returns whether a check is due, and if so schedules the next one.
  bool is_due(Clock::time_point now) {
    if (notice_.is_due(now)) {
      wants_notice_ = true;
    } else if (now < next_poll_) {
      return false;
    }
    pause_ = std::min<std::chrono::milliseconds>(pause_ * 2, std::chrono::seconds(30));
    next_poll_ = now < deadline_ ? std::min(now + pause_, deadline_) : now + pause_;
    return true;
  }
  bool is_time_up(Clock::time_point now) const { return now >= deadline_; }

  /// Returns whether a line is to be printed with the result of the last check; true once per line.
  bool take_notice() { return std::exchange(wants_notice_, false); }
  int64_t seconds(Clock::time_point now) const { return notice_.seconds(now); }

 private:
  std::chrono::milliseconds pause_{300};
  Clock::time_point next_poll_;
  Clock::time_point deadline_;
  WaitNotice notice_;
  bool wants_notice_ = false;
};

}  // namespace lockstep::detail
