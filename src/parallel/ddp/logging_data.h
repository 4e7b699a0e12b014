#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/ddp_logging_data.h>

namespace lockstep {

/// Times of the parts of a training step on this rank.
struct StepTimes {
  using Clock = std::chrono::steady_clock;
  struct Bucket {
    int64_t bytes = 0;
    size_t gradients = 0;
    Clock::time_point full{}, started{}, reduced{};
  };

  int64_t number = 0;                                // of the reduction, starting at 1
  Clock::time_point forward_begin{}, forward_end{};  // of the wrapper; zero if the wrapper's forward was not called
  Clock::time_point backward_begin{};                // first gradient
  Clock::time_point computed{};                      // last gradient; after it this rank only waits
  Clock::time_point backward_end{};
  std::vector<Bucket> buckets{};
};

/// Keeps the times of the last steps. Thread-safe.
class StepRecorder {
 public:
  void begin_forward();
  void end_forward();
  /// Ends a step and fills in its number and forward times.
  void add(StepTimes step);

  std::vector<StepTimes> steps() const;

 private:
  static constexpr size_t kKept = 64;

  mutable std::mutex mutex_;
  StepTimes::Clock::time_point forward_begin_{}, forward_end_{};  // guarded by mutex_
  int64_t count_ = 0;                                             // guarded by mutex_
  std::deque<StepTimes> steps_;                                   // guarded by mutex_
};

/// Fills in the members of `data` that describe the last step.
void describe_step(const StepTimes& step, DdpLoggingData& data);

/// Returns the steps of a rank as comma-separated events in Chrome's trace format: forward, backward and waiting on one
/// track, buckets on another. Times are of the host's steady clock, so ranks of one host line up.
std::string trace_events(int rank, const std::vector<StepTimes>& steps);

/// Returns a complete trace file for Perfetto or chrome://tracing.
std::string trace_file(const std::vector<std::string>& events_of_ranks);

}  // namespace lockstep
