#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <lockstep/ddp_logging_data.h>
#include <lockstep/work.h>

namespace lockstep {

/// A point of time in a training step.
struct Moment {
  std::chrono::steady_clock::time_point at{};
  /// On a GPU, the end of the work that was queued on a stream so far; StepRecorder::steps() replaces it by `at`.
  std::shared_ptr<const c10::Event> event{};
};

/// Times of the parts of a training step on this rank.
struct StepTimes {
  struct Bucket {
    int64_t bytes = 0;
    size_t gradients = 0;
    Moment full{}, started{}, reduced{};
  };

  int64_t number = 0;                     // of the reduction, starting at 1
  Moment forward_begin{}, forward_end{};  // of the wrapper; zero if the wrapper's forward was not called
  Moment backward_begin{};                // first gradient
  Moment computed{};                      // last gradient; after it this rank only waits
  Moment backward_end{};
  std::vector<Bucket> buckets{};
};

/// Takes and keeps the times of the last steps. Thread-safe.
///
/// On a GPU the host only queues work, so times are those of events on the streams. Such an event costs the host about
/// 2 us. The recorder therefore measures the first 8 steps and then one in 16. It measures no step that is captured in
/// a CUDA graph.
class StepRecorder {
 public:
  explicit StepRecorder(c10::Device device) : device_(device) {}

  /// Whether the current step is measured.
  bool is_measuring() const;
  /// Returns the current time: on a GPU, of the current stream.
  Moment now() const;
  /// Returns the time at which the call is complete. On the CPU, valid after the call has completed.
  Moment end_of(const Work& work) const;

  void begin_forward();
  void end_forward();
  /// Ends a step and fills in its number and forward times. Drops the times of a step that was not measured.
  void add(StepTimes step);

  /// Number of steps so far, measured or not.
  int64_t count() const;
  /// Returns the times of the last measured steps. On a GPU, blocks until these steps are complete.
  std::vector<StepTimes> steps() const;

 private:
  static constexpr size_t kKept = 64;

  void take_event_times() const;

  const c10::Device device_;
  mutable std::mutex mutex_;
  Moment forward_begin_{}, forward_end_{};  // guarded by mutex_
  int64_t count_ = 0;                       // guarded by mutex_
  mutable std::deque<StepTimes> steps_;     // guarded by mutex_; mutable: events are replaced by their times
};

/// Fills in the members of `data` that describe the last measured step.
void describe_step(const StepTimes& step, DdpLoggingData& data);

/// Returns the steps of a rank as comma-separated events in Chrome's trace format: forward, backward and waiting on one
/// track, buckets on another. Times are of the host's steady clock, so ranks of one host line up.
std::string trace_events(int rank, const std::vector<StepTimes>& steps);

/// Returns a complete trace file for Perfetto or chrome://tracing.
std::string trace_file(const std::vector<std::string>& events_of_ranks);

}  // namespace lockstep
