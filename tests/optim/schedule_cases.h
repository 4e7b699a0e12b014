#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include <lockstep/lr_scheduler.h>
#include <lockstep/schedules.h>

/// Schedules, and the expressions with which schedules_oracle.py makes the same ones.

namespace lockstep::schedules {

using torch::optim::Optimizer;
using Numbers = std::vector<double>;

constexpr double kRates[] = {0.1, 0.03};  // of the two parameter groups, here and in schedules_oracle.py

template <class Class, class Options>
std::unique_ptr<Optimizer> two_groups(Options options) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const double rate : kRates) {
    options.lr(rate);
    groups.emplace_back(std::vector<torch::Tensor>{torch::zeros({2}, torch::kDouble).requires_grad_()},
                        std::make_unique<Options>(options));
  }
  return std::make_unique<Class>(std::move(groups), options);
}

inline std::unique_ptr<Optimizer> sgd() {
  return two_groups<torch::optim::SGD>(torch::optim::SGDOptions(1).momentum(0.5));
}
inline std::unique_ptr<Optimizer> adam() {
  return two_groups<torch::optim::Adam>(torch::optim::AdamOptions(1).betas(std::make_tuple(0.5, 0.9)));
}
inline std::unique_ptr<Optimizer> rmsprop() {
  return two_groups<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1).momentum(0.5));
}

struct Case {
  std::string name;
  Schedule schedule;
  std::string python;
  int64_t steps;
  std::optional<int64_t> halve_at{};    // the program halves the rates before this step
  std::optional<int64_t> save_after{};  // Python saves its states
  std::unique_ptr<Optimizer> (*make)() = sgd;
  std::string optimizer_in_python = "sgd";
};

inline std::vector<Case> simple_cases() {
  const auto power = [](double base) { return [base](int64_t t) { return std::pow(base, static_cast<double>(t)); }; };
  return {
      {"constant", constant({.factor = 0.3, .total_iters = 4}), "ConstantLR(o, factor=0.3, total_iters=4)", 12},
      {"warm_up", linear({.start_factor = 0.1, .total_iters = 5}), "LinearLR(o, start_factor=0.1, total_iters=5)", 15},
      {"linear_decay", linear({.start_factor = 1, .end_factor = 0, .total_iters = 7}),
       "LinearLR(o, start_factor=1, end_factor=0, total_iters=7)", 20},
      {"step", step_decay({.step_size = 3, .gamma = 0.7}), "StepLR(o, step_size=3, gamma=0.7)", 12, {}, 5},
      {"multi_step", multi_step({.milestones = {2, 3, 9}, .gamma = 0.3}), "MultiStepLR(o, [2, 3, 9], gamma=0.3)", 20},
      {"exponential", exponential({.gamma = 0.93}), "ExponentialLR(o, gamma=0.93)", 30},
      {"polynomial", polynomial({.total_iters = 6}), "PolynomialLR(o, total_iters=6)", 15},
      {"square", polynomial({.total_iters = 9, .power = 2.3}), "PolynomialLR(o, total_iters=9, power=2.3)", 20},
      {"cosine", cosine_annealing({.t_max = 7}), "CosineAnnealingLR(o, T_max=7)", 30, {}, 4},
      {"cosine_above", cosine_annealing({.t_max = 10, .eta_min = 0.02}), "CosineAnnealingLR(o, T_max=10, eta_min=0.02)",
       45},
      {"short_cosine", cosine_annealing({.t_max = 1}), "CosineAnnealingLR(o, T_max=1)", 6},
      {"restarts", cosine_annealing_warm_restarts({.t_0 = 4}), "CosineAnnealingWarmRestarts(o, T_0=4)", 13},
      {"longer_restarts", cosine_annealing_warm_restarts({.t_0 = 2, .t_mult = 3, .eta_min = 0.001}),
       "CosineAnnealingWarmRestarts(o, T_0=2, T_mult=3, eta_min=0.001)", 60},
      {"lambda", lambda(power(0.9)), "LambdaLR(o, lambda t: 0.9 ** t)", 10},
      {"lambdas", lambda({power(0.9), power(0.8)}), "LambdaLR(o, [lambda t: 0.9 ** t, lambda t: 0.8 ** t])", 10},
      {"multiplicative", multiplicative(power(0.99)), "MultiplicativeLR(o, lambda t: 0.99 ** t)", 10},
      {"multiplicatives", multiplicative({power(0.99), power(0.98)}),
       "MultiplicativeLR(o, [lambda t: 0.99 ** t, lambda t: 0.98 ** t])", 10},
      {"swa", swa({.swa_lr = 0.05}), "SWALR(o, swa_lr=0.05)", 25},
      {"swa_linear", swa({.swa_lr = {0.05, 0.04}, .anneal_epochs = 4, .anneal_strategy = Anneal::kLinear}),
       "SWALR(o, swa_lr=[0.05, 0.04], anneal_epochs=4, anneal_strategy='linear')", 12},
      {"swa_at_once", swa({.swa_lr = 0.05, .anneal_epochs = 0}), "SWALR(o, swa_lr=0.05, anneal_epochs=0)", 4},
      {"halved", linear({.start_factor = 0.1, .total_iters = 9}), "LinearLR(o, start_factor=0.1, total_iters=9)", 20,
       4},
      {"halved_cosine", cosine_annealing({.t_max = 9}), "CosineAnnealingLR(o, T_max=9)", 20, 4},
  };
}

inline std::vector<Case> momentum_cases() {
  const CyclicOptions triangle{.base_lr = 0.01, .max_lr = 0.2, .step_size_up = 4};
  auto with = [](auto options, const auto& change) {
    change(options);
    return options;
  };
  const std::string python_triangle = "CyclicLR(o, base_lr=0.01, max_lr=0.2, step_size_up=4";
  const OneCycleOptions cycle{.max_lr = 0.5, .total_steps = 20};
  const std::string python_cycle = "OneCycleLR(o, max_lr=0.5, total_steps=20";
  return {
      {"one_cycle", one_cycle(cycle), python_cycle + ")", 20},
      {"one_cycle_linear", one_cycle(with(cycle, [](auto& o) { o.anneal_strategy = Anneal::kLinear; })),
       python_cycle + ", anneal_strategy='linear')", 20},
      {"one_cycle_three_phases", one_cycle(with(cycle, [](auto& o) { o.three_phase = true; })),
       python_cycle + ", three_phase=True)", 20},
      {"one_cycle_options",
       one_cycle({.max_lr = {0.5, 0.2},
                  .epochs = 3,
                  .steps_per_epoch = 7,
                  .pct_start = 0.45,
                  .base_momentum = {0.7, 0.8},
                  .max_momentum = {0.9, 0.99},
                  .div_factor = 11,
                  .final_div_factor = 77}),
       "OneCycleLR(o, max_lr=[0.5, 0.2], epochs=3, steps_per_epoch=7, pct_start=0.45, base_momentum=[0.7, 0.8], "
       "max_momentum=[0.9, 0.99], div_factor=11, final_div_factor=77)",
       21},
      {"one_cycle_without_momentum", one_cycle(with(cycle, [](auto& o) { o.cycle_momentum = false; })),
       python_cycle + ", cycle_momentum=False)", 20},
      {"one_cycle_adam", one_cycle(cycle), python_cycle + ")", 20, {}, {}, adam, "adam"},
      {"one_cycle_rmsprop", one_cycle(cycle), python_cycle + ")", 20, {}, {}, rmsprop},
      {"triangular", cyclic(triangle), python_triangle + ")", 25},
      {"triangular2", cyclic(with(triangle, [](auto& o) { o.mode = CyclicMode::kTriangular2; })),
       python_triangle + ", mode='triangular2')", 25},
      {"exp_range",
       cyclic(with(triangle,
                   [](auto& o) {
                     o.mode = CyclicMode::kExpRange;
                     o.gamma = 0.97;
                   })),
       python_triangle + ", mode='exp_range', gamma=0.97)", 25},
      {"cyclic_per_group",
       cyclic({.base_lr = {0.01, 0.02},
               .max_lr = {0.3, 0.4},
               .step_size_up = 3,
               .step_size_down = 5,
               .base_momentum = {0.5, 0.6},
               .max_momentum = {0.7, 0.8}}),
       "CyclicLR(o, base_lr=[0.01, 0.02], max_lr=[0.3, 0.4], step_size_up=3, step_size_down=5, base_momentum=[0.5, "
       "0.6], "
       "max_momentum=[0.7, 0.8])",
       25},
      {"cyclic_by_cycle",
       cyclic(with(triangle, [](auto& o) { o.scale_fn = [](int64_t x) { return 1.0 / static_cast<double>(x); }; })),
       python_triangle + ", scale_fn=lambda x: 1 / x)", 25},
      {"cyclic_by_iteration",
       cyclic(with(triangle,
                   [](auto& o) {
                     o.scale_fn = [](int64_t x) { return 1.0 / static_cast<double>(x + 1); };
                     o.scale_mode = CyclicScale::kIterations;
                   })),
       python_triangle + ", scale_fn=lambda x: 1 / (x + 1), scale_mode='iterations')", 25},
      // Python's CyclicLR changes Adam's first beta only since 2.x: compare with SGD's momentum.
      {"cyclic_adam", cyclic(triangle), python_triangle + ")", 25, {}, {}, adam},
  };
}

inline std::vector<Case> composite_cases() {
  const auto warm_up = linear({.start_factor = 0.1, .total_iters = 5});
  const auto cosine = cosine_annealing({.t_max = 12, .eta_min = 0.001});
  const auto decay = exponential({.gamma = 0.9});
  const std::string linear_lr = "LinearLR(o, start_factor=0.1, total_iters=5)",
                    decay_lr = "ExponentialLR(o, gamma=0.9)",
                    cosine_lr = "CosineAnnealingLR(o, T_max=12, eta_min=0.001)";
  const auto in_sequence = [](const std::string& schedulers, const std::string& milestones) {
    return "SequentialLR(o, [" + schedulers + "], milestones=[" + milestones + "])";
  };
  return {
      {"chained",
       chained({constant({.factor = 0.1, .total_iters = 6}), decay}),
       "ChainedScheduler([ConstantLR(o, factor=0.1, total_iters=6), " + decay_lr + "])",
       20,
       {},
       8},
      {"chained_three", chained({warm_up, decay, step_decay({.step_size = 4, .gamma = 0.5})}),
       "ChainedScheduler([" + linear_lr + ", " + decay_lr + ", StepLR(o, step_size=4, gamma=0.5)])", 20},
      {"sequential", sequential({warm_up, cosine}, {5}), in_sequence(linear_lr + ", " + cosine_lr, "5"), 45, {}, 3},
      {"sequential_halved", sequential({warm_up, cosine}, {5}), in_sequence(linear_lr + ", " + cosine_lr, "5"), 25, 9},
      {"sequential_three",
       sequential({constant({.factor = 0.2, .total_iters = 3}), multi_step({.milestones = {2}}),
                   polynomial({.total_iters = 6})},
                  {4, 9}),
       in_sequence("ConstantLR(o, factor=0.2, total_iters=3), MultiStepLR(o, [2]), PolynomialLR(o, total_iters=6)",
                   "4, 9"),
       40},
      {"sequential_absolute",
       sequential({step_decay({.step_size = 2}), lambda([](int64_t t) { return 1 / static_cast<double>(t + 1); }),
                   cosine_annealing_warm_restarts({.t_0 = 3, .t_mult = 2}), warm_up},
                  {3, 6, 25}),
       in_sequence("StepLR(o, step_size=2), LambdaLR(o, lambda t: 1 / (t + 1)), CosineAnnealingWarmRestarts(o, T_0=3, "
                   "T_mult=2), " +
                       linear_lr,
                   "3, 6, 25"),
       50},
      // Python's SequentialLR cannot contain another one, but it can contain its members.
      {"nested_first", sequential({sequential({warm_up, decay}, {4}), cosine}, {11}),
       in_sequence(linear_lr + ", " + decay_lr + ", " + cosine_lr, "4, 11"), 40},
      {"nested_last", sequential({warm_up, sequential({decay, cosine}, {6})}, {5}),
       in_sequence(linear_lr + ", " + decay_lr + ", " + cosine_lr, "5, 11"), 40},
      {"sequential_in_chained", chained({decay, sequential({warm_up, cosine}, {7})}),
       "ChainedScheduler([" + decay_lr + ", " + in_sequence(linear_lr + ", " + cosine_lr, "7") + "])", 25},
      {"chained_in_sequential", sequential({cosine, chained({warm_up, decay})}, {7}),
       "HandOver(" + cosine_lr + ", 7, lambda: ChainedScheduler([LinearLR(at_initial_lr(o), start_factor=0.1, " +
           "total_iters=5), " + decay_lr + "]))",
       25},
      {"swa_last", sequential({decay, swa({.swa_lr = 0.05, .anneal_epochs = 4})}, {6}),
       "HandOver(" + decay_lr + ", 6, lambda: SWALR(o, swa_lr=0.05, anneal_epochs=4))", 20},
      // Some releases of Python apply the factor of step 0 as well.
      {"multiplicative_last",
       sequential({decay, multiplicative([](int64_t t) { return 1 - 0.01 * static_cast<double>(t); })}, {6}),
       "HandOver(" + decay_lr + ", 6, lambda: MultiplicativeLR(o, lambda t: 1 - 0.01 * t))", 20},
      // OneCycleLR would also change the base rate and momentum of the scheduler before it.
      {"one_cycle_last", sequential({decay, one_cycle({.max_lr = 0.5, .total_steps = 9})}, {6}),
       "HandOver(" + decay_lr + ", 6, lambda: OneCycleLR(o, max_lr=0.5, total_steps=9))", 15},
  };
}

struct PlateauCase {
  std::string name;
  ReduceLROnPlateauOptions options;
  std::string python;
  Numbers metrics;
};

inline std::vector<PlateauCase> plateau_cases() {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const Numbers falling{5, 4, 4, 3.9999, 3.9999, 3, 3, 3, 3, nan, 3, 2, nan, nan, 2, 2, 2.5, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  Numbers rising;
  for (const double metric : falling) rising.push_back(-metric + 1);
  return {
      {"plateau", {.patience = 2}, "patience=2", falling},
      {"plateau_nan_first", {.patience = 0}, "patience=0", {nan, nan, 3, nan, 2, 2}},
      {"plateau_max",
       {.mode = MetricMode::kMax, .factor = 0.5, .patience = 1},
       "'max', factor=0.5, patience=1",
       rising},
      {"plateau_min_abs",
       {.patience = 1, .threshold = 0.5, .threshold_mode = ThresholdMode::kAbs},
       "patience=1, threshold=0.5, threshold_mode='abs'",
       falling},
      {"plateau_max_abs",
       {.mode = MetricMode::kMax, .patience = 1, .threshold = 0.01, .threshold_mode = ThresholdMode::kAbs},
       "'max', patience=1, threshold=0.01, threshold_mode='abs'",
       rising},
      {"plateau_cooldown",
       {.factor = 0.3, .patience = 1, .cooldown = 3, .min_lr = {0.01, 0.02}},
       "factor=0.3, patience=1, cooldown=3, min_lr=[0.01, 0.02]",
       falling},
      {"plateau_eps", {.factor = 0.9, .patience = 0, .eps = 0.005}, "factor=0.9, patience=0, eps=0.005", falling},
  };
}

}  // namespace lockstep::schedules
