#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

/// The contents of a progress line. Rates are those of recent time while the bar runs, and averages after its end.
struct ProgressView {
  struct Value {
    std::string name, text;
  };

  std::string title;
  int64_t done = 0;
  int64_t total = 0;  // 0: unknown
  std::vector<Value> values;
  std::optional<double> steps_per_second, samples_per_second;
  std::optional<double> waiting;                 // for data; a fraction of the time
  std::optional<std::chrono::nanoseconds> left;  // until the end of the bar
  std::chrono::nanoseconds elapsed{};            // since the bar began
  bool has_ended = false;
};

/// The counts of a bar, and the rates of recent time. It has no clock: times are passed. Not thread-safe.
///
/// Rates are ratios of sums in which older measurements weigh less: by a factor of e after 20 s, or after 20 steps if
/// 20 steps take longer. So rates begin as plain averages, and are steady whether steps take 0.1 ms or 100 s.
///
///   - The first step of a bar does not count as soon as there is a second measurement, because it includes the start
///     of the data loader and the warm-up of the first epoch.
///   - Samples per second are steps per second times the samples per step of the whole bar, because the samples of many
///     steps may be added at once.
///   - A single pause, such as a job that was stopped by Ctrl-Z, counts as 20 s at most. If two measurements in a row
///     are 10 times as slow as usual, the steps have become slower, and older measurements are dropped.
class ProgressState {
 public:
  using Time = std::chrono::steady_clock::time_point;

  /// The least time between two measurements, and between two updates of a live line.
  static constexpr std::chrono::milliseconds kTick{100};

  /// Starts a bar; keeps the values of the last bar.
  void begin(std::string title, int64_t total, int64_t done, Time now);
  /// Counts steps that end now. Returns whether it was time to measure the rates.
  bool advance(int64_t steps, Time now) {
    done_ += steps;
    if (std::exchange(has_new_samples_, false)) steps_with_samples_ = done_ - done_before_;
    if (now < next_measurement_) return false;
    measure(now);
    return true;
  }
  void add_samples(int64_t samples) {
    samples_ += samples;
    has_new_samples_ = true;
  }
  void add_waiting(std::chrono::nanoseconds waited) {
    counts_.waiting += std::chrono::duration<double>(waited).count();
    has_waiting_ = true;
  }
  void set(std::string_view name, double value);

  /// Returns the state of the bar after the last call of advance().
  ProgressView view();
  /// Returns the state of the bar after its end, which is `now`.
  ProgressView final_view(Time now);

 private:
  struct Counts {
    double steps = 0, seconds = 0;
    double waiting = 0;  // seconds
  };
  struct Value {
    std::string name;
    double value = 0;
    bool keeps_zeros = false;  // it has had digits in all places: zeros at its end keep the line from jumping
  };

  void measure(Time now);
  ProgressView view_with(const Counts& rates);

  std::string title_;
  int64_t done_ = 0, total_ = 0;
  int64_t done_before_ = 0;  // at the begin
  std::vector<Value> values_;
  Time begin_{};
  Time next_measurement_{};
  Counts counts_;    // since the begin; steps and seconds as of the last measurement
  Counts measured_;  // counts_ at the last measurement
  Counts recent_;    // weighted
  int measurements_ = 0;
  int64_t samples_ = 0;
  int64_t steps_with_samples_ = 0;  // since the begin
  bool has_new_samples_ = false;
  bool was_slow_ = false;  // at the last measurement
  bool has_waiting_ = false;
};

}  // namespace lockstep
