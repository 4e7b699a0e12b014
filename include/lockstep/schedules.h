#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/export.h>

// Learning rate schedules: the rules of Python's torch.optim.lr_scheduler as values. A schedule knows no optimizer; an
// LRScheduler (lr_scheduler.h) applies it to one:
//
//     namespace schedules = lockstep::schedules;
//     auto warm_up_then_cosine = schedules::sequential(
//         {schedules::linear({.start_factor = 0.1, .total_iters = 5}), schedules::cosine_annealing({.t_max = 95})},
//         {5});
//     lockstep::LRScheduler scheduler(optimizer, warm_up_then_cosine);
//
// As in Python, rules are recursive: most compute the next rate from the rate that the parameter group has now. Rules
// can therefore be chained, and a rate that the program changes itself stays changed. Steps are calls of
// LRScheduler::step(): batches or epochs, as the program decides. The base rate of a parameter group is the rate that
// it had when the LRScheduler was constructed (Python's initial_lr).
//
// The functions throw UsageError, which names the schedule, the option, its value and the expected values, for invalid
// options. Options that are given for each parameter group are compared with the groups when an LRScheduler is
// constructed. Nothing here is collective. Schedules are immutable and may be shared by threads, unless a function that
// the program passes is not thread-safe.

namespace lockstep {

/// One number for all parameter groups, `.max_lr = 0.1`, or one for each, `.max_lr = {0.1, 0.01}`.
class LOCKSTEP_EXPORT PerGroup {
 public:
  PerGroup() = default;  // not set
  PerGroup(double value) : values_{value}, is_for_all_(true) {}
  PerGroup(std::initializer_list<double> values) : values_(values) {}
  PerGroup(std::vector<double> values) : values_(std::move(values)) {}

  bool is_set() const { return !values_.empty(); }
  double operator[](size_t group) const { return is_for_all_ ? values_.front() : values_[group]; }
  const std::vector<double>& values() const { return values_; }
  /// Throws UsageError, which begins with `name`, unless there is a number for each of `groups` parameter groups.
  void check(const std::string& name, size_t groups) const;

 private:
  std::vector<double> values_{};
  bool is_for_all_ = false;
};

/// The rates of a schedule, as functions of their arguments. Derive from it for a rule that the functions below cannot
/// express. Steps count from 1; `group` is the number of the parameter group, `base` its base rate, `lr` its rate now.
class LOCKSTEP_EXPORT ScheduleRule {
 public:
  virtual ~ScheduleRule();

  /// Returns the rate when an LRScheduler is constructed.
  virtual double first(double lr, double base, size_t group) const = 0;
  /// Returns the rate when sequential() switches to this rule, instead of first().
  virtual double restart(double lr, double base, size_t group) const = 0;
  /// Returns the rate of step `t` >= 1 since first() or restart().
  virtual double next(double lr, double base, int64_t t, size_t group) const = 0;
  /// Returns the momentum of step `t` >= 0; none if the rule leaves it unchanged.
  virtual std::optional<double> momentum(int64_t t, size_t group) const;
  /// Whether momentum() returns numbers: the optimizer must have a momentum then.
  virtual bool cycles_momentum() const;
  /// Throws UsageError unless the rule fits an optimizer with `groups` parameter groups.
  virtual void check_groups(size_t groups) const;
};

/// A rule, as a value. Copies share the rule.
class LOCKSTEP_EXPORT Schedule {
 public:
  /// Throws UsageError if `rule` is null.
  explicit Schedule(std::shared_ptr<const ScheduleRule> rule);
  const ScheduleRule& rule() const { return *rule_; }

 private:
  std::shared_ptr<const ScheduleRule> rule_;
};

namespace schedules {

enum class Anneal { kCos, kLinear };

/// ConstantLR: the rate times `factor`, until step `total_iters`. The factor is more than 0 and at most 1.
struct ConstantOptions {
  double factor = 1.0 / 3;
  int64_t total_iters = 5;
};
LOCKSTEP_EXPORT Schedule constant(const ConstantOptions& options = {});

/// LinearLR: a factor that changes linearly from `start_factor` to `end_factor` in `total_iters` steps, the usual
/// warm-up. `start_factor` is more than 0 and at most 1, `end_factor` is from 0 to 1.
struct LinearOptions {
  double start_factor = 1.0 / 3;
  double end_factor = 1;
  int64_t total_iters = 5;
};
LOCKSTEP_EXPORT Schedule linear(const LinearOptions& options = {});

/// StepLR: the rate is multiplied by `gamma` every `step_size` steps.
struct StepDecayOptions {
  int64_t step_size = 0;  ///< required
  double gamma = 0.1;
};
LOCKSTEP_EXPORT Schedule step_decay(const StepDecayOptions& options);

/// MultiStepLR: the rate is multiplied by `gamma` at each milestone. Milestones are positive and increasing.
struct MultiStepOptions {
  std::vector<int64_t> milestones{};
  double gamma = 0.1;
};
LOCKSTEP_EXPORT Schedule multi_step(const MultiStepOptions& options);

/// ExponentialLR: the rate is multiplied by `gamma` at each step.
struct ExponentialOptions {
  double gamma = 0;  ///< required
};
LOCKSTEP_EXPORT Schedule exponential(const ExponentialOptions& options);

/// PolynomialLR: the rate decays to 0 in `total_iters` steps, as a polynomial.
struct PolynomialOptions {
  int64_t total_iters = 5;
  double power = 1;
};
LOCKSTEP_EXPORT Schedule polynomial(const PolynomialOptions& options = {});

/// CosineAnnealingLR: half a cosine from the base rate to `eta_min` in `t_max` steps. Afterwards the rate rises again;
/// use sequential() or end the training there.
struct CosineAnnealingOptions {
  int64_t t_max = 0;  ///< required
  double eta_min = 0;
};
LOCKSTEP_EXPORT Schedule cosine_annealing(const CosineAnnealingOptions& options);

/// CosineAnnealingWarmRestarts: cosine_annealing() that restarts at the base rate after `t_0` steps, and each further
/// time after `t_mult` times as many. Sets the rate from the base rate: what precedes it in chained() has no effect.
struct CosineAnnealingWarmRestartsOptions {
  int64_t t_0 = 0;  ///< required
  int64_t t_mult = 1;
  double eta_min = 0;
};
LOCKSTEP_EXPORT Schedule cosine_annealing_warm_restarts(const CosineAnnealingWarmRestartsOptions& options);

/// OneCycleLR: from max_lr / div_factor up to `max_lr`, and down to max_lr / div_factor / final_div_factor, in
/// `total_steps` steps; a step beyond total_steps throws UsageError. The optimizer's own rate is not used. Unless
/// `cycle_momentum` is false, the momentum moves in the opposite direction: SGD's or RMSprop's momentum, or the first
/// beta of Adam and AdamW.
struct OneCycleOptions {
  PerGroup max_lr{};            ///< required
  int64_t total_steps = 0;      ///< required, unless epochs and steps_per_epoch are set
  int64_t epochs = 0;           ///< with steps_per_epoch, if total_steps is not set
  int64_t steps_per_epoch = 0;  //
  double pct_start = 0.3;       ///< the part of the steps in which the rate rises, from 0 to 1
  Anneal anneal_strategy = Anneal::kCos;
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.85;
  PerGroup max_momentum = 0.95;
  double div_factor = 25;
  double final_div_factor = 1e4;
  bool three_phase = false;  ///< first back to max_lr / div_factor, then down to the end
};
LOCKSTEP_EXPORT Schedule one_cycle(const OneCycleOptions& options);

enum class CyclicMode {
  kTriangular,   ///< all cycles are equal
  kTriangular2,  ///< each cycle is half as high as the one before
  kExpRange,     ///< the height is multiplied by gamma at each step
};
enum class CyclicScale { kCycle, kIterations };

/// CyclicLR: up from `base_lr` to `max_lr` in `step_size_up` steps, down again in `step_size_down`, and so on. The
/// optimizer's own rate is not used. The momentum moves in the opposite direction, as with one_cycle().
struct CyclicOptions {
  PerGroup base_lr{};  ///< required
  PerGroup max_lr{};   ///< required
  int64_t step_size_up = 2000;
  std::optional<int64_t> step_size_down{};  ///< default: step_size_up
  CyclicMode mode = CyclicMode::kTriangular;
  double gamma = 1;                             ///< of kExpRange
  std::function<double(int64_t x)> scale_fn{};  ///< if set, the height of a cycle, instead of `mode`
  CyclicScale scale_mode =
      CyclicScale::kCycle;  ///< whether scale_fn gets the number of the cycle, from 1, or of the step
  bool cycle_momentum = true;
  PerGroup base_momentum = 0.8;
  PerGroup max_momentum = 0.9;
};
LOCKSTEP_EXPORT Schedule cyclic(const CyclicOptions& options);

/// A factor for each step. Must be a pure function: it is not saved with the scheduler's state.
using Factor = std::function<double(int64_t t)>;

/// LambdaLR: the base rate times factor(t), from t = 0. One function for all parameter groups, or one for each.
LOCKSTEP_EXPORT Schedule lambda(Factor factor);
LOCKSTEP_EXPORT Schedule lambda(std::vector<Factor> factors);

/// MultiplicativeLR: the current rate times factor(t), from t = 1. When sequential() switches to it, the rate stays as
/// it is, as in PyTorch 1.13; later releases of Python apply factor(0) then, which is not used otherwise.
LOCKSTEP_EXPORT Schedule multiplicative(Factor factor);
LOCKSTEP_EXPORT Schedule multiplicative(std::vector<Factor> factors);

/// SWALR of torch.optim.swa_utils: from the current rate to `swa_lr` in `anneal_epochs` steps; at once if it is 0.
struct SwaOptions {
  PerGroup swa_lr{};  ///< required
  int64_t anneal_epochs = 10;
  Anneal anneal_strategy = Anneal::kCos;
};
LOCKSTEP_EXPORT Schedule swa(const SwaOptions& options);

/// ChainedScheduler: applies all schedules at each step, each to the rate that the one before it returned.
LOCKSTEP_EXPORT Schedule chained(std::vector<Schedule> schedules);

/// SequentialLR: one schedule after the other. The first begins at step 0, schedule i + 1 at step milestones[i], where
/// its own steps begin at 0. Milestones are positive and increasing, one fewer than schedules. A schedule that begins
/// sets the rate from the base rate, not from the rate that the one before it ended with; only multiplicative() and
/// swa() continue from that rate.
///
/// Unlike Python's, it can contain sequential() and chained() at any place: in Python, a nested SequentialLR or
/// ChainedScheduler fails or begins at the wrong step. one_cycle() and cyclic() set rate and momentum only while it is
/// their turn, and the base rate of all schedules is the optimizer's: Python's OneCycleLR and CyclicLR change rate and
/// momentum, and OneCycleLR the base rate of the others, when they are constructed.
LOCKSTEP_EXPORT Schedule sequential(std::vector<Schedule> schedules, std::vector<int64_t> milestones);

}  // namespace schedules
}  // namespace lockstep
