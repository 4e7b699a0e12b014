#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/ddp_logging_data.h>

namespace lockstep {

/// When the parts of a training step happened on this rank.
struct StepTimes {
  using Clock = std::chrono::steady_clock;
  struct Bucket {
    int64_t bytes = 0;
    size_t gradients = 0;
    Clock::time_point full{}, started{}, reduced{};
  };

  int64_t number = 0;                                // of the reduction, from 1
  Clock::time_point forward_begin{}, forward_end{};  // of the wrapper; zero when it was not used
  Clock::time_point backward_begin{};                // its first gradient
  Clock::time_point computed{};                      // its last gradient: from here on this rank only waits
  Clock::time_point backward_end{};
  std::vector<Bucket> buckets{};
};

/// The last steps. Thread-safe.
class StepRecorder {
 public:
  void begin_forward();
  void end_forward();
  /// Ends a step; forward times are filled in.
  void add(StepTimes step);

  std::vector<StepTimes> steps() const;

 private:
  static constexpr size_t kKept = 64;

  mutable std::mutex mutex_;
  StepTimes::Clock::time_point forward_begin_{}, forward_end_{};  // guarded by mutex_
  int64_t count_ = 0;                                             // guarded by mutex_
  std::deque<StepTimes> steps_;                                   // guarded by mutex_
};

/// Fills in what a step says.
void describe_step(const StepTimes& step, DdpLoggingData& data);

/// The steps of a rank as events in Chrome's trace format, separated by commas: forward, backward and waiting on one
/// track, buckets on another. Times are of the machine's clock, so ranks of one host fit together.
std::string trace_events(int rank, const std::vector<StepTimes>& steps);

/// A whole file of them, which Perfetto and chrome://tracing open.
std::string trace_file(const std::vector<std::string>& events_of_ranks);

}  // namespace lockstep
