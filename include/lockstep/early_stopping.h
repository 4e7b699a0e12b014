#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <lockstep/export.h>
#include <lockstep/metric_mode.h>
#include <lockstep/value.h>

namespace lockstep {

struct EarlyStoppingOptions {
  /// The metric to watch, for TrainingRun.
  std::string metric{};
  MetricMode mode = MetricMode::kMax;
  /// Stop after this many values in a row without an improvement.
  int64_t patience = 3;
  /// A value is an improvement if it is better than the best one by more than this.
  double min_delta = 0;
};

/// Decides when to stop because a metric does not improve any more:
///
///     lockstep::EarlyStopping stopping({.patience = 5});
///     for (int epoch = 0; epoch < epochs; ++epoch) {
///       train(epoch);
///       if (stopping.update(accuracy)) break;   // the same accuracy on all ranks
///     }
///
/// Not collective: pass the same values on all ranks. NaN is no improvement. Not thread-safe.
class LOCKSTEP_EXPORT EarlyStopping {
 public:
  /// Throws UsageError if the patience is below 1 or min_delta is negative.
  explicit EarlyStopping(EarlyStoppingOptions options = {});

  /// Adds a value. Returns whether to stop.
  bool update(double value);
  bool should_stop() const { return without_improvement_ >= options_.patience; }
  std::optional<double> best() const { return best_; }
  const EarlyStoppingOptions& options() const { return options_; }

  Value state_dict() const;
  void load_state_dict(const Value& state);

 private:
  EarlyStoppingOptions options_;
  std::optional<double> best_{};
  int64_t without_improvement_ = 0;
};

}  // namespace lockstep
