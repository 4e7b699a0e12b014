// The schedules that move rate and momentum in opposite directions: Python's OneCycleLR and CyclicLR. They set the
// rate, rather than multiply it, so the previous rate has no effect.

#include <lockstep/schedules.h>

#include <cmath>
#include <numbers>
#include <optional>
#include <utility>
#include <vector>

#include <lockstep/error.h>

#include "base/text.h"
#include "optim/schedule_options.h"

namespace lockstep::schedules {
namespace {

/// Moves from `start` to `end` while `part` moves from 0 to 1.
double anneal(Anneal strategy, double start, double end, double part) {
  if (strategy == Anneal::kLinear) return (end - start) * part + start;
  return end + (start - end) / 2.0 * (std::cos(std::numbers::pi * part) + 1);
}

class OneCycle : public ScheduleRule {
 public:
  OneCycle(const OneCycleOptions& options, int64_t total_steps)
      : options_(options), total_steps_(total_steps), phases_(phases(options, static_cast<double>(total_steps))) {}

  double first(double, double, size_t group) const override { return rate(0, group); }
  double restart(double, double, size_t group) const override { return rate(0, group); }
  double next(double, double, int64_t t, size_t group) const override {
    if (t > total_steps_)
      throw UsageError(text("one_cycle: step ", t, " is beyond total_steps, which is ", total_steps_,
                            "; set total_steps to the number of steps of the training"));
    return rate(t, group);
  }
  std::optional<double> momentum(int64_t t, size_t group) const override {
    if (!options_.cycle_momentum) return std::nullopt;
    const auto momentum_of = [&](Level level) {
      return level == kPeak ? options_.base_momentum[group] : options_.max_momentum[group];
    };
    const auto [phase, part] = phase_of(t);
    return anneal(options_.anneal_strategy, momentum_of(phase.from), momentum_of(phase.to), part);
  }
  bool cycles_momentum() const override { return options_.cycle_momentum; }
  void check_groups(size_t groups) const override {
    options_.max_lr.check("one_cycle: max_lr", groups);
    options_.base_momentum.check("one_cycle: base_momentum", groups);
    options_.max_momentum.check("one_cycle: max_momentum", groups);
  }

 private:
  enum Level { kStart, kPeak, kEnd };
  struct Phase {
    double end_step;
    Level from, to;
  };

  static std::vector<Phase> phases(const OneCycleOptions& options, double total) {
    const double peak = options.pct_start * total - 1;
    if (!options.three_phase) return {{peak, kStart, kPeak}, {total - 1, kPeak, kEnd}};
    return {{peak, kStart, kPeak}, {2 * options.pct_start * total - 2, kPeak, kStart}, {total - 1, kStart, kEnd}};
  }

  /// Returns the phase of a step, and the part of the phase that is over. A phase without length is over: Python
  /// divides by 0 there.
  std::pair<Phase, double> phase_of(int64_t t) const {
    const auto step = static_cast<double>(t);
    double begin = 0;
    size_t i = 0;
    for (; i + 1 < phases_.size() && step > phases_[i].end_step; ++i) begin = phases_[i].end_step;
    const double length = phases_[i].end_step - begin;
    return {phases_[i], length == 0 ? 1 : (step - begin) / length};
  }

  double rate(int64_t t, size_t group) const {
    const auto rate_of = [&](Level level) {
      const double peak = options_.max_lr[group], start = peak / options_.div_factor;
      return level == kPeak ? peak : level == kStart ? start : start / options_.final_div_factor;
    };
    const auto [phase, part] = phase_of(t);
    return anneal(options_.anneal_strategy, rate_of(phase.from), rate_of(phase.to), part);
  }

  const OneCycleOptions options_;
  const int64_t total_steps_;
  const std::vector<Phase> phases_;
};

class Cyclic : public ScheduleRule {
 public:
  explicit Cyclic(const CyclicOptions& options) : options_(options) {}

  double first(double, double, size_t group) const override { return rate(0, group); }
  double restart(double, double, size_t group) const override { return rate(0, group); }
  double next(double, double, int64_t t, size_t group) const override { return rate(t, group); }
  std::optional<double> momentum(int64_t t, size_t group) const override {
    if (!options_.cycle_momentum) return std::nullopt;
    const double low = options_.base_momentum[group], high = options_.max_momentum[group];
    const auto [height, scale] = height_and_scale(t);
    return high - (high - low) * height * scale;
  }
  bool cycles_momentum() const override { return options_.cycle_momentum; }
  void check_groups(size_t groups) const override {
    options_.base_lr.check("cyclic: base_lr", groups);
    options_.max_lr.check("cyclic: max_lr", groups);
    options_.base_momentum.check("cyclic: base_momentum", groups);
    options_.max_momentum.check("cyclic: max_momentum", groups);
  }

 private:
  double rate(int64_t t, size_t group) const {
    const double low = options_.base_lr[group], high = options_.max_lr[group];
    const auto [height, scale] = height_and_scale(t);
    return low + (high - low) * height * scale;
  }

  /// Returns where in its triangle step `t` is, from 0 to 1, and the height of the triangle.
  std::pair<double, double> height_and_scale(int64_t t) const {
    const auto step = static_cast<double>(t);
    const auto up = static_cast<double>(options_.step_size_up);
    const double total = up + static_cast<double>(options_.step_size_down.value_or(options_.step_size_up));
    const double ratio = up / total, cycle = std::floor(1 + step / total);
    const double x = 1.0 + step / total - cycle;
    const double height = x <= ratio ? x / ratio : (x - 1) / (ratio - 1);
    if (options_.scale_fn)
      return {height, options_.scale_fn(options_.scale_mode == CyclicScale::kCycle ? static_cast<int64_t>(cycle) : t)};
    if (options_.mode == CyclicMode::kTriangular2) return {height, 1 / std::pow(2.0, cycle - 1)};
    if (options_.mode == CyclicMode::kExpRange) return {height, std::pow(options_.gamma, step)};
    return {height, 1};
  }

  const CyclicOptions options_;
};

}  // namespace

Schedule one_cycle(const OneCycleOptions& options) {
  int64_t total_steps = options.total_steps;
  if (total_steps == 0 && options.epochs == 0 && options.steps_per_epoch == 0)
    throw UsageError("one_cycle: total_steps is not set, expected 1 or more, or epochs and steps_per_epoch");
  if (total_steps == 0) {
    detail::check_positive("one_cycle", "epochs", options.epochs);
    detail::check_positive("one_cycle", "steps_per_epoch", options.steps_per_epoch);
    total_steps = options.epochs * options.steps_per_epoch;
  }
  detail::check_positive("one_cycle", "total_steps", total_steps);
  detail::check_rates("one_cycle", "max_lr", options.max_lr);
  detail::check_option(options.pct_start >= 0 && options.pct_start <= 1, "one_cycle", "pct_start", options.pct_start,
                       "0 to 1");
  detail::check_option(options.div_factor > 0, "one_cycle", "div_factor", options.div_factor, "more than 0");
  detail::check_option(options.final_div_factor > 0, "one_cycle", "final_div_factor", options.final_div_factor,
                       "more than 0");
  detail::check_momenta("one_cycle", "base_momentum", options.base_momentum);
  detail::check_momenta("one_cycle", "max_momentum", options.max_momentum);
  return detail::make_schedule<OneCycle>(options, total_steps);
}

Schedule cyclic(const CyclicOptions& options) {
  detail::check_rates("cyclic", "base_lr", options.base_lr);
  detail::check_rates("cyclic", "max_lr", options.max_lr);
  detail::check_positive("cyclic", "step_size_up", options.step_size_up);
  detail::check_positive("cyclic", "step_size_down", options.step_size_down.value_or(1));
  detail::check_not_negative("cyclic", "gamma", options.gamma);
  detail::check_momenta("cyclic", "base_momentum", options.base_momentum);
  detail::check_momenta("cyclic", "max_momentum", options.max_momentum);
  return detail::make_schedule<Cyclic>(options);
}

}  // namespace lockstep::schedules
