// The rules of Python's torch.optim.lr_scheduler, in the recursive form that Python uses, with the same operations in
// the same order, so that the rates have the same bits. Python's classes keep counters; these classes compute the rates
// from the step number t, so a schedule has no state:
//   - first() is Python's get_lr() in the constructor;
//   - restart() is step(0), with which SequentialLR starts a scheduler: the closed form at 0, or get_lr() without one;
//   - next() is get_lr() at last_epoch = t.
// Where PyTorch 1.13 and 2.x differ, the rules follow 2.x: SWALR begins its annealing one step after SequentialLR has
// switched to it, and CyclicLR changes the first beta of Adam.

#include <lockstep/schedules.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string_view>
#include <utility>

#include <lockstep/error.h>

#include "base/text.h"
#include "optim/schedule_options.h"

namespace lockstep {

void PerGroup::check(const std::string& name, size_t groups) const {
  if (!is_set()) throw UsageError(text(name, " is not set, expected one number or one for each parameter group"));
  if (!is_for_all_ && values_.size() != groups)
    throw UsageError(text(name, " has ", values_.size(), " numbers, expected one for each of the optimizer's ", groups,
                          " parameter groups, or one for all"));
}

ScheduleRule::~ScheduleRule() = default;

std::optional<double> ScheduleRule::momentum(int64_t, size_t) const {
  return std::nullopt;
}

bool ScheduleRule::cycles_momentum() const {
  return false;
}

void ScheduleRule::check_groups(size_t) const {}

Schedule::Schedule(std::shared_ptr<const ScheduleRule> rule) : rule_(std::move(rule)) {
  if (!rule_) throw UsageError("Schedule: the rule is null, expected a ScheduleRule");
}

namespace schedules {
namespace {

using detail::check_not_negative;
using detail::check_option;
using detail::check_positive;
using detail::check_rates;
using detail::make_schedule;
using std::numbers::pi;

void check_milestones(std::string_view schedule, const std::vector<int64_t>& milestones) {
  int64_t last = 0;
  for (size_t i = 0; i < milestones.size(); ++i) {
    if (milestones[i] <= last)
      throw UsageError(text(schedule, ": milestones[", i, "] is ", milestones[i], ", expected ", last + 1,
                            " or more; milestones are positive and increasing"));
    last = milestones[i];
  }
}

// --- rules that multiply the rate

class Constant : public ScheduleRule {
 public:
  explicit Constant(const ConstantOptions& options) : options_(options) {}
  double first(double lr, double, size_t) const override { return lr * options_.factor; }
  double restart(double, double base, size_t) const override { return base * options_.factor; }
  double next(double lr, double, int64_t t, size_t) const override {
    return t == options_.total_iters ? lr * (1.0 / options_.factor) : lr;
  }

 private:
  const ConstantOptions options_;
};

class Linear : public ScheduleRule {
 public:
  explicit Linear(const LinearOptions& options) : options_(options) {}
  double first(double lr, double, size_t) const override { return lr * options_.start_factor; }
  double restart(double, double base, size_t) const override { return base * options_.start_factor; }
  double next(double lr, double, int64_t t, size_t) const override {
    const auto& [start, end, total] = options_;
    if (t > total) return lr;
    return lr *
           (1.0 + (end - start) / (static_cast<double>(total) * start + static_cast<double>(t - 1) * (end - start)));
  }

 private:
  const LinearOptions options_;
};

/// Begins with the rate as it is, or the base rate, and multiplies the rate by a factor at each step.
class Decay : public ScheduleRule {
 public:
  using FactorOf = std::function<double(int64_t t)>;
  explicit Decay(FactorOf factor) : factor_(std::move(factor)) {}
  double first(double lr, double, size_t) const override { return lr; }
  double restart(double, double base, size_t) const override { return base; }
  double next(double lr, double, int64_t t, size_t) const override { return lr * factor_(t); }

 private:
  const FactorOf factor_;
};

// --- cosines

class CosineAnnealing : public ScheduleRule {
 public:
  explicit CosineAnnealing(const CosineAnnealingOptions& options)
      : eta_min_(options.eta_min), t_max_(options.t_max), length_(static_cast<double>(options.t_max)) {}
  double first(double lr, double, size_t) const override { return lr; }
  double restart(double, double base, size_t) const override { return eta_min_ + (base - eta_min_) * 2 / 2; }
  double next(double lr, double base, int64_t t, size_t) const override {
    // The rate was eta_min, so the quotient below would be 0 / 0.
    if ((t - 1 - t_max_) % (2 * t_max_) == 0) return lr + (base - eta_min_) * (1 - std::cos(pi / length_)) / 2;
    const auto now = static_cast<double>(t), before = static_cast<double>(t - 1);
    return (1 + std::cos(pi * now / length_)) / (1 + std::cos(pi * before / length_)) * (lr - eta_min_) + eta_min_;
  }

 private:
  const double eta_min_;
  const int64_t t_max_;
  const double length_;  // t_max
};

class CosineAnnealingWarmRestarts : public ScheduleRule {
 public:
  explicit CosineAnnealingWarmRestarts(const CosineAnnealingWarmRestartsOptions& options) : options_(options) {}
  double first(double, double base, size_t) const override { return rate(base, 0); }
  double restart(double, double base, size_t) const override { return rate(base, 0); }
  double next(double, double base, int64_t t, size_t) const override { return rate(base, t); }

 private:
  double rate(double base, int64_t t) const {
    const auto& [t_0, t_mult, eta_min] = options_;
    int64_t period = t_0;
    if (t_mult == 1) t %= t_0;
    while (t >= period) {
      t -= period;
      const bool is_last = period > std::numeric_limits<int64_t>::max() / t_mult;
      period = is_last ? std::numeric_limits<int64_t>::max() : period * t_mult;
    }
    const double angle = pi * static_cast<double>(t) / static_cast<double>(period);
    return eta_min + (base - eta_min) * (1 + std::cos(angle)) / 2;
  }

  const CosineAnnealingWarmRestartsOptions options_;
};

// --- weight averaging

/// Recovers the rate that the annealing began with from the current rate.
class Swa : public ScheduleRule {
 public:
  explicit Swa(const SwaOptions& options) : options_(options) {}
  double first(double lr, double base, size_t group) const override { return next(lr, base, 0, group); }
  double restart(double lr, double base, size_t group) const override { return next(lr, base, 0, group); }
  double next(double lr, double, int64_t t, size_t group) const override {
    if (options_.anneal_epochs == 0) t = std::max<int64_t>(1, t);
    const double target = options_.swa_lr[group], before = part_at(t - 1), now = part_at(t);
    const double begin = before == 1 ? target : (lr - before * target) / (1 - before);
    return target * now + begin * (1 - now);
  }
  void check_groups(size_t groups) const override { options_.swa_lr.check("swa: swa_lr", groups); }

 private:
  double part_at(int64_t t) const {
    const auto length = static_cast<double>(std::max<int64_t>(1, options_.anneal_epochs));
    const double part = std::clamp(static_cast<double>(t) / length, 0.0, 1.0);
    return options_.anneal_strategy == Anneal::kLinear ? part : (1 - std::cos(pi * part)) / 2;
  }

  const SwaOptions options_;
};

// --- functions of the program

/// The base rate (kIsOfBase) or the current rate, times a function's value.
template <bool kIsOfBase>
class TimesFunction : public ScheduleRule {
 public:
  TimesFunction(std::string name, std::vector<Factor> factors, bool is_for_all)
      : name_(std::move(name)), factors_(std::move(factors)), is_for_all_(is_for_all) {
    for (const auto& factor : factors_)
      if (!factor) throw UsageError(text(name_, ": a function is empty, expected one that returns a factor"));
  }
  double first(double lr, double base, size_t group) const override {
    return kIsOfBase ? next(lr, base, 0, group) : lr;
  }
  double restart(double lr, double base, size_t group) const override { return first(lr, base, group); }
  double next(double lr, double base, int64_t t, size_t group) const override {
    return (kIsOfBase ? base : lr) * factors_[is_for_all_ ? 0 : group](t);
  }
  void check_groups(size_t groups) const override {
    if (!is_for_all_ && factors_.size() != groups)
      throw UsageError(text(name_, " has ", factors_.size(), " functions, expected one for each of the optimizer's ",
                            groups, " parameter groups, or one for all"));
  }

 private:
  const std::string name_;
  const std::vector<Factor> factors_;
  const bool is_for_all_;
};

// --- composites

class Composite : public ScheduleRule {
 public:
  explicit Composite(std::vector<Schedule> members) : members_(std::move(members)) {}
  bool cycles_momentum() const override {
    return std::any_of(members_.begin(), members_.end(), [](const auto& m) { return m.rule().cycles_momentum(); });
  }
  void check_groups(size_t groups) const override {
    for (const auto& member : members_) member.rule().check_groups(groups);
  }

 protected:
  const std::vector<Schedule> members_;  // not empty
};

class Chained : public Composite {
 public:
  using Composite::Composite;
  double first(double lr, double base, size_t group) const override {
    for (const auto& member : members_) lr = member.rule().first(lr, base, group);
    return lr;
  }
  double restart(double lr, double base, size_t group) const override {
    lr = members_.front().rule().restart(lr, base, group);
    for (size_t i = 1; i < members_.size(); ++i) lr = members_[i].rule().first(lr, base, group);
    return lr;
  }
  double next(double lr, double base, int64_t t, size_t group) const override {
    for (const auto& member : members_) lr = member.rule().next(lr, base, t, group);
    return lr;
  }
  std::optional<double> momentum(int64_t t, size_t group) const override {
    std::optional<double> last;
    for (const auto& member : members_)
      if (const auto momentum = member.rule().momentum(t, group)) last = momentum;
    return last;
  }
};

class Sequential : public Composite {
 public:
  Sequential(std::vector<Schedule> members, std::vector<int64_t> milestones)
      : Composite(std::move(members)), milestones_(std::move(milestones)) {}
  double first(double lr, double base, size_t group) const override {
    return members_.front().rule().first(lr, base, group);
  }
  double restart(double lr, double base, size_t group) const override {
    return members_.front().rule().restart(lr, base, group);
  }
  double next(double lr, double base, int64_t t, size_t group) const override {
    const auto [rule, own_t] = active(t);
    return own_t == 0 ? rule.restart(lr, base, group) : rule.next(lr, base, own_t, group);
  }
  std::optional<double> momentum(int64_t t, size_t group) const override {
    const auto [rule, own_t] = active(t);
    return rule.momentum(own_t, group);
  }

 private:
  struct Active {
    const ScheduleRule& rule;
    int64_t t;  // its own step
  };
  Active active(int64_t t) const {
    size_t i = 0;
    while (i < milestones_.size() && milestones_[i] <= t) ++i;
    return {members_[i].rule(), i == 0 ? t : t - milestones_[i - 1]};
  }

  const std::vector<int64_t> milestones_;  // one fewer than members_
};

}  // namespace

Schedule constant(const ConstantOptions& options) {
  check_option(options.factor > 0 && options.factor <= 1, "constant", "factor", options.factor,
               "more than 0 and at most 1");
  check_positive("constant", "total_iters", options.total_iters);
  return make_schedule<Constant>(options);
}

Schedule linear(const LinearOptions& options) {
  const auto& [start, end, total_iters] = options;
  check_option(start > 0 && start <= 1, "linear", "start_factor", start, "more than 0 and at most 1");
  check_option(end >= 0 && end <= 1, "linear", "end_factor", end, "0 to 1");
  check_positive("linear", "total_iters", total_iters);
  return make_schedule<Linear>(options);
}

Schedule step_decay(const StepDecayOptions& options) {
  check_positive("step_decay", "step_size", options.step_size);
  check_not_negative("step_decay", "gamma", options.gamma);
  return make_schedule<Decay>([options](int64_t t) { return t % options.step_size == 0 ? options.gamma : 1; });
}

Schedule multi_step(const MultiStepOptions& options) {
  check_milestones("multi_step", options.milestones);
  check_not_negative("multi_step", "gamma", options.gamma);
  return make_schedule<Decay>([options](int64_t t) {
    return std::binary_search(options.milestones.begin(), options.milestones.end(), t) ? options.gamma : 1;
  });
}

Schedule exponential(const ExponentialOptions& options) {
  check_option(options.gamma > 0 && std::isfinite(options.gamma), "exponential", "gamma", options.gamma, "more than 0");
  return make_schedule<Decay>([options](int64_t) { return options.gamma; });
}

Schedule polynomial(const PolynomialOptions& options) {
  check_positive("polynomial", "total_iters", options.total_iters);
  check_not_negative("polynomial", "power", options.power);
  return make_schedule<Decay>([options](int64_t t) {
    if (t > options.total_iters) return 1.0;
    const auto total = static_cast<double>(options.total_iters);
    const double now = 1.0 - static_cast<double>(t) / total, before = 1.0 - static_cast<double>(t - 1) / total;
    return std::pow(now / before, options.power);
  });
}

Schedule cosine_annealing(const CosineAnnealingOptions& options) {
  check_positive("cosine_annealing", "t_max", options.t_max);
  check_not_negative("cosine_annealing", "eta_min", options.eta_min);
  return make_schedule<CosineAnnealing>(options);
}

Schedule cosine_annealing_warm_restarts(const CosineAnnealingWarmRestartsOptions& options) {
  check_positive("cosine_annealing_warm_restarts", "t_0", options.t_0);
  check_positive("cosine_annealing_warm_restarts", "t_mult", options.t_mult);
  check_not_negative("cosine_annealing_warm_restarts", "eta_min", options.eta_min);
  return make_schedule<CosineAnnealingWarmRestarts>(options);
}

Schedule lambda(Factor factor) {
  return make_schedule<TimesFunction<true>>("lambda", std::vector<Factor>{std::move(factor)}, /*is_for_all=*/true);
}

Schedule lambda(std::vector<Factor> factors) {
  return make_schedule<TimesFunction<true>>("lambda", std::move(factors), /*is_for_all=*/false);
}

Schedule multiplicative(Factor factor) {
  return make_schedule<TimesFunction<false>>("multiplicative", std::vector<Factor>{std::move(factor)},
                                             /*is_for_all=*/true);
}

Schedule multiplicative(std::vector<Factor> factors) {
  return make_schedule<TimesFunction<false>>("multiplicative", std::move(factors), /*is_for_all=*/false);
}

Schedule swa(const SwaOptions& options) {
  check_rates("swa", "swa_lr", options.swa_lr);
  check_option(options.anneal_epochs >= 0, "swa", "anneal_epochs", options.anneal_epochs, "0 or more");
  return make_schedule<Swa>(options);
}

Schedule chained(std::vector<Schedule> schedules) {
  if (schedules.empty()) throw UsageError("chained: there are 0 schedules, expected 1 or more");
  return make_schedule<Chained>(std::move(schedules));
}

Schedule sequential(std::vector<Schedule> schedules, std::vector<int64_t> milestones) {
  if (schedules.empty()) throw UsageError("sequential: there are 0 schedules, expected 1 or more");
  if (milestones.size() + 1 != schedules.size())
    throw UsageError(text("sequential: there are ", schedules.size(), " schedules and ", milestones.size(),
                          " milestones, expected ", schedules.size() - 1, ": one before each schedule but the first"));
  check_milestones("sequential", milestones);
  return make_schedule<Sequential>(std::move(schedules), std::move(milestones));
}

}  // namespace schedules
}  // namespace lockstep
