#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

/// When a client sends heartbeats: at regular intervals, and more often when it begins to report the rank's activity,
/// at once and then with doubling pauses from 10 ms on. What the store knows of a rank that dies soon is thus at most
/// half as old as the rank's activity. Not thread-safe.
class HeartbeatSchedule {
 public:
  using Clock = std::chrono::steady_clock;

  explicit HeartbeatSchedule(std::chrono::milliseconds interval, Clock::time_point now = Clock::now())
      : interval_(interval), pause_(interval), due_(now) {}

  /// The time of the next heartbeat.
  Clock::time_point due() const { return due_; }

  /// Returns whether a heartbeat is due, and schedules the next one if so.
  bool is_due(Clock::time_point now) {
    if (now < due_) return false;
    due_ = now + std::min(pause_, interval_);
    pause_ = std::min(pause_ * 2, interval_);
    return true;
  }

  /// There is an activity to report: a heartbeat is due at once.
  void make_due(Clock::time_point now) {
    pause_ = std::chrono::milliseconds(10);
    due_ = now;
  }

 private:
  std::chrono::milliseconds interval_, pause_;
  Clock::time_point due_;
};

}  // namespace lockstep
