#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <lockstep/early_stopping.h>
#include <lockstep/training_run.h>
#include <lockstep/value.h>

namespace lockstep::detail {

/// The metrics of an epoch that the options of a TrainingRun name: `best` and the metric of `early_stopping`. Not
/// collective: all ranks pass the same values.
class WatchedMetrics {
 public:
  explicit WatchedMetrics(const TrainingRunOptions& options);

  /// Adds the metrics of epoch `epoch`, counted from 1. `must_save`: a checkpoint is saved after the epoch, so `best`
  /// is needed. Returns an error if an option names a metric that was not logged; else empty.
  std::string update(const std::map<std::string, double>& results, int64_t epoch, bool must_save);
  /// Whether early stopping ends the run.
  bool should_stop() const { return early_stopping_ && early_stopping_->should_stop(); }
  /// Logs a warning if no epoch had a value for best.pt, in this start of the run or, as the file shows, before.
  void warn_without_best(const std::string& run_folder, const std::string& best_file) const;

  /// The state of early stopping.
  Value state_dict() const { return early_stopping_ ? early_stopping_->state_dict() : Value(); }
  void load_state_dict(const Value& state);

 private:
  const std::string best_;
  std::optional<EarlyStopping> early_stopping_{};
  bool has_best_value_ = false;
};

}  // namespace lockstep::detail
