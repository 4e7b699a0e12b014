#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace lockstep {

/// The schedule of log lines about a long wait: after 10 s, 20 s later, 40 s later, and so on up to every 10 minutes.
/// Not thread-safe.
class WaitNotice {
 public:
  using Clock = std::chrono::steady_clock;

  explicit WaitNotice(Clock::time_point begin = Clock::now()) : begin_(begin), due_(begin + pause_) {}

  /// The time of the next line.
  Clock::time_point due() const { return due_; }

  /// Returns whether a line is due, and schedules the next one if so.
  bool is_due(Clock::time_point now) {
    if (now < due_) return false;
    pause_ = std::min<std::chrono::seconds>(pause_ * 2, std::chrono::minutes(10));
    due_ = now + pause_;
    return true;
  }

  /// The duration of the wait so far, in seconds.
  int64_t seconds(Clock::time_point now) const {
    return std::chrono::round<std::chrono::seconds>(now - begin_).count();
  }

 private:
  Clock::time_point begin_;
  std::chrono::seconds pause_{10};
  Clock::time_point due_;
};

}  // namespace lockstep
