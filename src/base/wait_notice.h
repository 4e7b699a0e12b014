#pragma once

#include <chrono>
#include <cstdint>

namespace lockstep {

/// When to print that a wait takes long: after 10 s, and then each time that it has lasted twice as long. Not
/// thread-safe.
class WaitNotice {
 public:
  using Clock = std::chrono::steady_clock;

  explicit WaitNotice(Clock::time_point begin = Clock::now()) : begin_(begin) {}

  /// When the next line is due.
  Clock::time_point due() const { return begin_ + next_; }

  /// Whether a line is due; true once for each.
  bool is_due(Clock::time_point now) {
    if (now < due()) return false;
    while (due() <= now) next_ *= 2;
    return true;
  }

  int64_t seconds(Clock::time_point now) const {
    return std::chrono::duration_cast<std::chrono::seconds>(now - begin_).count();
  }

 private:
  Clock::time_point begin_;
  std::chrono::seconds next_{10};
};

}  // namespace lockstep
