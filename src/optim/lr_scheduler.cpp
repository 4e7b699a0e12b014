#include <lockstep/lr_scheduler.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "optim/schedule_options.h"

namespace lockstep {
namespace {

std::vector<double> rates_of(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

// --- momentum

/// Sets the number that Python's OneCycleLR and CyclicLR change: the momentum, or the first beta. Returns false, and
/// changes nothing, if the options have neither. Only checks if there is no momentum to set.
bool set_momentum(torch::optim::OptimizerOptions& options, std::optional<double> momentum) {
  const auto set = [&](auto* typed) {
    if (!momentum) return true;
    if constexpr (requires { typed->betas(); })
      typed->betas(std::make_tuple(*momentum, std::get<1>(typed->betas())));
    else
      typed->momentum(*momentum);
    return true;
  };
  if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) return set(sgd);
  if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) return set(rmsprop);
  if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options)) return set(adam);
  if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(&options)) return set(adamw);
  return false;
}

void check_has_momentum(torch::optim::Optimizer& optimizer) {
  auto& groups = optimizer.param_groups();
  for (size_t g = 0; g < groups.size(); ++g)
    if (!set_momentum(groups[g].options(), std::nullopt))
      throw UsageError(text("LRScheduler: the schedule changes the momentum, but parameter group ", g,
                            " of the optimizer has none, expected SGD, RMSprop, Adam or AdamW; set cycle_momentum = "
                            "false in the schedule"));
}

// --- states

void check_same_groups(std::string_view scheduler, const torch::optim::Optimizer& optimizer, size_t expected) {
  if (const auto actual = optimizer.param_groups().size(); actual != expected)
    throw UsageError(text(scheduler, ": the optimizer has ", actual, " parameter groups, but had ", expected,
                          " when the scheduler was constructed; construct a new scheduler after adding groups"));
}

Value list_of(const std::vector<double>& numbers) {
  return Value::list({numbers.begin(), numbers.end()});
}

/// Returns the value with this key. Python's SequentialLR and ChainedScheduler have some values only in the states of
/// their members.
const Value& find_in_state(const Value& state, const char* key) {
  const Value* members = state.find("_schedulers");
  if (state.contains(key) || !members || members->size() == 0) return state.at(key);
  return find_in_state(members->elements().front(), key);
}

/// Returns the rates of a state, one for each parameter group.
std::vector<double> read_rates(std::string_view scheduler, const Value& rates, const char* key, size_t groups) {
  std::vector<double> result;
  for (const auto& rate : rates.elements()) result.push_back(rate.as_double());
  if (result.size() != groups)
    throw UsageError(text(scheduler, ": ", key, " of the state has rates of ", result.size(),
                          " parameter groups, but the optimizer has ", groups,
                          "; construct the optimizer with the same groups"));
  return result;
}

int64_t read_step_number(std::string_view scheduler, const Value& number, const char* key) {
  const int64_t result = number.as_int();
  if (result < 0) throw UsageError(text(scheduler, ": ", key, " of the state is ", result, ", expected 0 or more"));
  return result;
}

}  // namespace

// --- LRScheduler

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : optimizer_(optimizer), schedule_(std::move(schedule)), base_(rates_of(optimizer)) {
  const auto& rule = schedule_.rule();
  rule.check_groups(base_.size());
  if (rule.cycles_momentum()) check_has_momentum(optimizer_);
  std::vector<double> rates;
  for (size_t g = 0; g < base_.size(); ++g) rates.push_back(rule.first(base_[g], base_[g], g));
  set_rates(0, std::move(rates));
}

void LRScheduler::step() {
  check_same_groups("LRScheduler", optimizer_, base_.size());
  auto rates = rates_of(optimizer_);
  for (size_t g = 0; g < rates.size(); ++g) rates[g] = schedule_.rule().next(rates[g], base_[g], last_step_ + 1, g);
  set_rates(last_step_ + 1, std::move(rates));
}

void LRScheduler::set_rates(int64_t t, std::vector<double> rates) {
  auto& groups = optimizer_.param_groups();
  std::vector<std::optional<double>> momenta;
  for (size_t g = 0; g < groups.size(); ++g) momenta.push_back(schedule_.rule().momentum(t, g));
  for (size_t g = 0; g < groups.size(); ++g) {
    groups[g].options().set_lr(rates[g]);
    set_momentum(groups[g].options(), momenta[g]);
  }
  last_step_ = t;
  last_lr_ = std::move(rates);
}

Value LRScheduler::state_dict() const {
  return Value::dict({{"last_epoch", last_step_},
                      {"_step_count", last_step_ + 1},
                      {"base_lrs", list_of(base_)},
                      {"_last_lr", list_of(last_lr_)}});
}

void LRScheduler::load_state_dict(const Value& state) {
  const auto rates = [&](const char* key) {
    return read_rates("LRScheduler", find_in_state(state, key), key, base_.size());
  };
  const auto last_step = read_step_number("LRScheduler", find_in_state(state, "last_epoch"), "last_epoch");
  auto base = rates("base_lrs"), last_lr = rates("_last_lr");
  last_step_ = last_step;
  base_ = std::move(base);
  last_lr_ = std::move(last_lr);
}

// --- ReduceLROnPlateau

namespace {

double worst(MetricMode mode) {
  const double infinity = std::numeric_limits<double>::infinity();
  return mode == MetricMode::kMin ? infinity : -infinity;
}

constexpr const char* kPlateau = "ReduceLROnPlateau";

}  // namespace

ReduceLROnPlateau::ReduceLROnPlateau(torch::optim::Optimizer& optimizer, ReduceLROnPlateauOptions options)
    : optimizer_(optimizer), options_(std::move(options)), best_(worst(options_.mode)), last_lr_(rates_of(optimizer)) {
  detail::check_option(options_.factor >= 0 && options_.factor < 1, kPlateau, "factor", options_.factor,
                       "at least 0 and less than 1");
  detail::check_option(options_.patience >= 0, kPlateau, "patience", options_.patience, "0 or more");
  detail::check_option(options_.cooldown >= 0, kPlateau, "cooldown", options_.cooldown, "0 or more");
  detail::check_not_negative(kPlateau, "eps", options_.eps);
  detail::check_rates(kPlateau, "min_lr", options_.min_lr);
  options_.min_lr.check(text(kPlateau, ": min_lr"), last_lr_.size());
}

void ReduceLROnPlateau::step(double metric) {
  check_same_groups(kPlateau, optimizer_, last_lr_.size());
  if (options_.group) metric = options_.group->all_reduce(metric, ReduceOp::kAvg);
  ++last_step_;
  if (is_better(metric)) {
    best_ = metric;
    num_bad_epochs_ = 0;
  } else {
    ++num_bad_epochs_;
  }
  if (cooldown_counter_ > 0) {
    --cooldown_counter_;
    num_bad_epochs_ = 0;
  }
  if (num_bad_epochs_ > options_.patience) {
    reduce();
    cooldown_counter_ = options_.cooldown;
    num_bad_epochs_ = 0;
  }
  last_lr_ = rates_of(optimizer_);
}

/// False if the metric is NaN.
bool ReduceLROnPlateau::is_better(double metric) const {
  const double threshold = options_.threshold;
  const bool is_relative = options_.threshold_mode == ThresholdMode::kRel;
  if (options_.mode == MetricMode::kMin) return metric < (is_relative ? best_ * (1.0 - threshold) : best_ - threshold);
  return metric > (is_relative ? best_ * (threshold + 1.0) : best_ + threshold);
}

void ReduceLROnPlateau::reduce() {
  auto& groups = optimizer_.param_groups();
  for (size_t g = 0; g < groups.size(); ++g) {
    auto& options = groups[g].options();
    const double reduced = std::max(options.get_lr() * options_.factor, options_.min_lr[g]);
    if (options.get_lr() - reduced > options_.eps) options.set_lr(reduced);
  }
}

Value ReduceLROnPlateau::state_dict() const {
  return Value::dict({{"best", best_},
                      {"num_bad_epochs", num_bad_epochs_},
                      {"cooldown_counter", cooldown_counter_},
                      {"last_epoch", last_step_},
                      {"_last_lr", list_of(last_lr_)}});
}

void ReduceLROnPlateau::load_state_dict(const Value& state) {
  const auto number = [&](const char* key) { return read_step_number(kPlateau, state.at(key), key); };
  const double best = state.at("best").as_double();
  const auto num_bad_epochs = number("num_bad_epochs"), cooldown_counter = number("cooldown_counter"),
             last_step = number("last_epoch");
  // Before its first step, Python's scheduler of PyTorch 1.13 has no rates.
  auto last_lr = state.contains("_last_lr") ? read_rates(kPlateau, state.at("_last_lr"), "_last_lr", last_lr_.size())
                                            : rates_of(optimizer_);
  best_ = best;
  num_bad_epochs_ = num_bad_epochs;
  cooldown_counter_ = cooldown_counter;
  last_step_ = last_step;
  last_lr_ = std::move(last_lr);
}

}  // namespace lockstep
