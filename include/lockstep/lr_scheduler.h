#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <torch/optim/optimizer.h>

#include <lockstep/export.h>
#include <lockstep/metric_mode.h>
#include <lockstep/process_group.h>
#include <lockstep/schedules.h>
#include <lockstep/state_traits.h>
#include <lockstep/value.h>

namespace lockstep {

/// Sets the learning rates of an optimizer according to a schedule (schedules.h), and the momentum if the schedule has
/// one. For LibTorch's optimizers, lockstep's fused ones, ZeroRedundancyOptimizer, and any other whose options have a
/// learning rate.
///
///     lockstep::LRScheduler scheduler(optimizer, lockstep::schedules::cosine_annealing({.t_max = steps}));
///     for (...) { ...; optimizer.step(); scheduler.step(); }
///
/// The constructor sets the rates of the first step. Construct it before the optimizer's state is loaded, then load
/// both: the rates that the optimizer has at construction are the base rates. Rates are computed from the step alone,
/// so ranks that make the same calls have the same rates. Not collective. Not thread-safe. Not copyable. The optimizer
/// must outlive it.
class LOCKSTEP_EXPORT LRScheduler {
 public:
  /// Throws UsageError, and changes nothing, if the schedule is for another number of parameter groups, or changes the
  /// momentum of an optimizer that is not SGD, RMSprop, Adam or AdamW.
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  LRScheduler(const LRScheduler&) = delete;
  LRScheduler& operator=(const LRScheduler&) = delete;

  /// Sets the rates of the next step. Call it after the optimizer's step: once per batch or once per epoch, as the
  /// schedule counts. Does not wait for a GPU. Throws UsageError, and changes nothing, if the schedule has ended
  /// (one_cycle) or a parameter group was added to the optimizer after construction.
  void step();

  /// The number of calls of step(); Python's last_epoch.
  int64_t last_step() const { return last_step_; }
  /// The rates that the constructor, step() or load_state_dict() has set last, one for each parameter group; Python's
  /// get_last_lr().
  const std::vector<double>& last_lr() const { return last_lr_; }

  /// The state, with the keys of Python's schedulers: last_epoch, _step_count, base_lrs, _last_lr. The schedule is not
  /// part of the state: construct the scheduler with the same schedule.
  Value state_dict() const;
  /// Loads a state of lockstep, or of Python's scheduler of the same kind. Does not change the optimizer, whose rates
  /// are part of its own state. Throws UsageError, and changes nothing, if the state has another layout or another
  /// number of parameter groups.
  void load_state_dict(const Value& state);

 private:
  void set_rates(int64_t t, std::vector<double> rates);

  torch::optim::Optimizer& optimizer_;
  const Schedule schedule_;
  std::vector<double> base_;  // the base rate of each parameter group
  int64_t last_step_ = 0;
  std::vector<double> last_lr_;
};

enum class ThresholdMode { kRel, kAbs };

struct ReduceLROnPlateauOptions {
  MetricMode mode = MetricMode::kMin;
  double factor = 0.1;      ///< by which the rate is multiplied, at least 0 and less than 1
  int64_t patience = 10;    ///< steps without a better metric after which the next one reduces the rate
  double threshold = 1e-4;  ///< by how much a better metric differs from the best one,
  ThresholdMode threshold_mode = ThresholdMode::kRel;  ///< relative to the best one, or absolutely
  int64_t cooldown = 0;                                ///< steps after a reduction in which metrics are not counted
  PerGroup min_lr = 0.0;                               ///< the rates are not reduced below it
  double eps = 1e-8;  ///< a rate is left unchanged if the reduction would be at most this
  /// If set, step() averages the metric over the ranks of the group.
  std::optional<ProcessGroup> group{};
};

/// Reduces the learning rates of an optimizer when a metric stops improving, as Python's ReduceLROnPlateau does. A
/// metric that is NaN is not better than any other.
///
/// All ranks must reduce their rates in the same step. Set `group`, or pass metrics that are equal on all ranks.
///
/// Not thread-safe. Not copyable. The optimizer must outlive it.
class LOCKSTEP_EXPORT ReduceLROnPlateau {
 public:
  /// Not collective. Throws UsageError for invalid options.
  explicit ReduceLROnPlateau(torch::optim::Optimizer& optimizer, ReduceLROnPlateauOptions options = {});
  ReduceLROnPlateau(const ReduceLROnPlateau&) = delete;
  ReduceLROnPlateau& operator=(const ReduceLROnPlateau&) = delete;

  /// Call it after each evaluation. Collective if `group` is set, otherwise not. Throws UsageError, before anything is
  /// sent or changed, if a parameter group was added to the optimizer after construction; the group's errors.
  void step(double metric);

  int64_t last_step() const { return last_step_; }
  const std::vector<double>& last_lr() const { return last_lr_; }
  /// The best metric so far: infinity, or minus infinity in mode kMax, before the first.
  double best() const { return best_; }

  /// The state, with Python's keys: best, num_bad_epochs, cooldown_counter, last_epoch, _last_lr. Options are not part
  /// of it. Loading does not change the optimizer, and ignores the options in a state of Python's. Throws UsageError,
  /// and changes nothing, as LRScheduler does.
  Value state_dict() const;
  void load_state_dict(const Value& state);

 private:
  bool is_better(double metric) const;
  void reduce();

  torch::optim::Optimizer& optimizer_;
  const ReduceLROnPlateauOptions options_;
  double best_;
  int64_t num_bad_epochs_ = 0;
  int64_t cooldown_counter_ = 0;
  int64_t last_step_ = 0;
  std::vector<double> last_lr_;
};

}  // namespace lockstep
