#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep::detail {

/// When to look at a call that takes long: first after a moment, then after twice as long, and so on, and when its time
/// is up.
class Patience {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Patience(Clock::time_point begin, Clock::time_point deadline = Clock::time_point::max())
      : next_look_(begin + pause_), deadline_(deadline) {}

  bool is_over(Clock::time_point now) {
    if (now < next_look_) return false;
    pause_ = std::min<std::chrono::milliseconds>(pause_ * 2, std::chrono::seconds(30));
    next_look_ = now < deadline_ ? std::min(now + pause_, deadline_) : now + pause_;
    return true;
  }
  bool is_time_up(Clock::time_point now) const { return now >= deadline_; }

 private:
  std::chrono::milliseconds pause_{300};
  Clock::time_point next_look_;
  Clock::time_point deadline_;
};

}  // namespace lockstep::detail
