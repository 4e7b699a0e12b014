#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <lockstep/process_group.h>
#include <lockstep/progress.h>

#include "report/metric_sums.h"

namespace lockstep::detail {

/// The output of a TrainingRun on the terminal: one live line for each loop over batches, and a line that stays for
/// each epoch. Not collective; only rank 0 prints. Not thread-safe.
class RunDisplay {
 public:
  RunDisplay(const ProcessGroup& group, const ProgressOptions& options)
      : group_(group), is_on_(options.output != ProgressOptions::Output::kOff), progress_(group, options) {}

  /// `epoch` is counted from 1.
  void begin_epoch(int64_t epoch, int64_t epochs);
  /// `batches` is the number of batches in a whole loop, 0 if unknown; `done` batches were processed before.
  void begin_loop(int64_t batches, int64_t done);
  void end_step(int64_t batches);
  /// Prints the line of the epoch.
  void end_epoch(const std::map<std::string, double>& results);
  void end() { progress_.end(); }

  /// Shows the mean of a metric from now on.
  void add_metric(std::string_view name);
  /// Shows the values of the newest record.
  void show(std::map<std::string, double> record);
  void add_samples(int64_t samples) { progress_.add_samples(samples); }
  void add_waiting(std::chrono::nanoseconds waited) { progress_.add_waiting(waited); }
  /// Prints a line that stays.
  void print_line(const std::string& line) const;

 private:
  using Clock = std::chrono::steady_clock;

  const ProcessGroup group_;
  const bool is_on_;
  Progress progress_;
  std::string title_{};
  bool has_bar_ = false;
  Clock::time_point epoch_began_{};
  std::vector<std::string> metrics_{};  // in the order of their first value
  std::map<std::string, Smoothed, std::less<>> smoothed_{};
  std::map<std::string, double> shown_record_{};
};

}  // namespace lockstep::detail
