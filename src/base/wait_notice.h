#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace lockstep {

/// When to print that a wait takes long: after 10 s, then 20 s later, 40 s, and so on to every 10 minutes. Not
/// thread-safe.
class WaitNotice {
 public:
  using Clock = std::chrono::steady_clock;

  explicit WaitNotice(Clock::time_point begin = Clock::now()) : begin_(begin), due_(begin + pause_) {}

  /// When the next line is due.
  Clock::time_point due() const { return due_; }

  /// Whether a line is due; true once for each.
  bool is_due(Clock::time_point now) {
    if (now < due_) return false;
    pause_ = std::min<std::chrono::seconds>(pause_ * 2, std::chrono::minutes(10));
    due_ = now + pause_;
    return true;
  }

  /// How long the wait has lasted.
  int64_t seconds(Clock::time_point now) const {
    return std::chrono::round<std::chrono::seconds>(now - begin_).count();
  }

 private:
  Clock::time_point begin_;
  std::chrono::seconds pause_{10};
  Clock::time_point due_;
};

}  // namespace lockstep
