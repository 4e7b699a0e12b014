#pragma once

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/wait_notice.h"

namespace lockstep::detail {

/// When to look at a call that takes long: first after a moment, then after twice as long, and so on, and when its time
/// is up; and when to print that it waits.
class Backoff {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Backoff(Clock::time_point begin, Clock::time_point deadline = Clock::time_point::max())
      : next_look_(begin + pause_), deadline_(deadline), notice_(begin) {}

  bool is_over(Clock::time_point now) {
    if (notice_.is_due(now)) {
      wants_notice_ = true;
    } else if (now < next_look_) {
      return false;
    }
    pause_ = std::min<std::chrono::milliseconds>(pause_ * 2, std::chrono::seconds(30));
    next_look_ = now < deadline_ ? std::min(now + pause_, deadline_) : now + pause_;
    return true;
  }
  bool is_time_up(Clock::time_point now) const { return now >= deadline_; }

  /// Whether a line is to be printed with what the last look finds; true once for each.
  bool take_notice() { return std::exchange(wants_notice_, false); }
  int64_t seconds(Clock::time_point now) const { return notice_.seconds(now); }

 private:
  std::chrono::milliseconds pause_{300};
  Clock::time_point next_look_;
  Clock::time_point deadline_;
  WaitNotice notice_;
  bool wants_notice_ = false;
};

}  // namespace lockstep::detail
