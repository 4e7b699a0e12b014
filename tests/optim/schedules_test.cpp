#include <lockstep/lr_scheduler.h>
#include <lockstep/schedules.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <lockstep/checkpoint_file.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/optimizer_state.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "optim/schedule_cases.h"
#include "support/messages.h"
#include "support/python.h"
#include "support/temporary_folder.h"

// The oracle is Python's PyTorch: schedules_oracle.py runs the same schedulers and returns all rates.

namespace lockstep::schedules {
namespace {

using json = nlohmann::json;

constexpr double kRelativeTolerance = 1e-12;

Numbers rates_in(const Optimizer& optimizer) {
  Numbers rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

Numbers momenta_in(const Optimizer& optimizer) {
  Numbers momenta;
  for (const auto& group : optimizer.param_groups()) {
    const auto& options = group.options();
    if (const auto* one = dynamic_cast<const torch::optim::SGDOptions*>(&options)) momenta.push_back(one->momentum());
    if (const auto* one = dynamic_cast<const torch::optim::RMSpropOptions*>(&options))
      momenta.push_back(one->momentum());
    if (const auto* one = dynamic_cast<const torch::optim::AdamOptions*>(&options))
      momenta.push_back(std::get<0>(one->betas()));
  }
  return momenta;
}

/// What Python's schedulers do, for all cases. Python runs once for all tests: starting it takes seconds.
class Oracle {
 public:
  explicit Oracle(const std::string& python) {
    auto cases = json::array();
    for (const auto& list : {simple_cases(), momentum_cases(), composite_cases()})
      for (const auto& c : list) {
        names_.push_back(c.name);
        cases.push_back(
            {{"name", c.name}, {"python", c.python}, {"steps", c.steps}, {"optimizer", c.optimizer_in_python}});
        if (c.halve_at) cases.back()["halve_at"] = *c.halve_at;
        if (c.save_after) cases.back()["save_after"] = *c.save_after;
      }
    for (const auto& c : plateau_cases()) {
      names_.push_back(c.name);
      cases.push_back({{"name", c.name},
                       {"python", "ReduceLROnPlateau(o, " + c.python + ")"},
                       {"metrics", c.metrics},
                       {"optimizer", "sgd"},
                       {"save_after", 4}});
    }
    const auto in = folder_.path() / "cases.json", out = folder_.path() / "results.json";
    std::ofstream(in) << cases;
    if (run_python(python, "optim/schedules_oracle.py", {in.string(), out.string(), folder_.path().string()}) != 0)
      throw std::runtime_error("schedules_oracle.py failed");
    const auto results = json::parse(std::ifstream(out));
    for (size_t i = 0; i < names_.size(); ++i) results_[names_[i]] = results.at(i);
  }

  const json& operator[](const std::string& name) const { return results_.at(name); }
  std::string saved(const std::string& name) const { return (folder_.path() / (name + ".pt")).string(); }

 private:
  TemporaryFolder folder_;
  std::vector<std::string> names_;
  std::map<std::string, json> results_;
};

class PythonSchedules : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const char* python = std::getenv(GetParam());
    if (!python || !*python) GTEST_SKIP() << "needs Python's torch: set " << GetParam();
    static std::map<std::string, std::unique_ptr<Oracle>> oracles;
    auto& oracle = oracles[python];
    if (!oracle) oracle = std::make_unique<Oracle>(python);
    oracle_ = oracle.get();
  }
  void TearDown() override {
    RecordProperty("rates", compared_);
    RecordProperty("rates_with_other_bits", inexact_);
  }

  void expect_numbers(const Numbers& actual, const json& expected, const std::string& what) {
    ASSERT_EQ(actual.size(), expected.size()) << what;
    for (size_t i = 0; i < actual.size(); ++i) {
      const double number = expected[i];
      EXPECT_LE(std::abs(actual[i] - number), kRelativeTolerance * std::abs(number))
          << what << ", parameter group " << i << ": " << actual[i] << ", expected " << number;
      ++compared_;
      inexact_ += actual[i] != number;
    }
  }

  /// Steps from `begin` to the end of the case.
  void expect_as_python(const Case& c, Optimizer& optimizer, LRScheduler& scheduler, int64_t begin) {
    const auto& expected = (*oracle_)[c.name];
    for (int64_t t = begin;; ++t) {
      const auto what = c.name + ", step " + std::to_string(t);
      EXPECT_EQ(scheduler.last_step(), t);
      EXPECT_EQ(scheduler.last_lr(), rates_in(optimizer)) << what;
      expect_numbers(rates_in(optimizer), expected["lrs"][t], what);
      expect_numbers(momenta_in(optimizer), expected["momenta"][t], what + ", momentum");
      if (t == c.steps || HasFatalFailure()) break;
      if (c.halve_at == t + 1)
        for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() * 0.5);
      scheduler.step();
    }
  }

  void expect_as_python(const std::vector<Case>& cases) {
    for (const auto& c : cases) {
      const auto optimizer = c.make();
      LRScheduler scheduler(*optimizer, c.schedule);
      expect_as_python(c, *optimizer, scheduler, 0);
    }
  }

  const Oracle* oracle_ = nullptr;
  int compared_ = 0, inexact_ = 0;
};

INSTANTIATE_TEST_SUITE_P(With, PythonSchedules, testing::Values("LOCKSTEP_TEST_PYTHON", "LOCKSTEP_TEST_PYTHON_2X"),
                         [](const auto& info) { return std::string(info.param).ends_with("2X") ? "2x" : "installed"; });

TEST_P(PythonSchedules, RulesHavePythonsRates) {
  expect_as_python(simple_cases());
}

TEST_P(PythonSchedules, CyclesHavePythonsRatesAndMomenta) {
  expect_as_python(momentum_cases());
}

TEST_P(PythonSchedules, CompositesHavePythonsRates) {
  expect_as_python(composite_cases());
}

TEST_P(PythonSchedules, APlateauReducesTheRatesWhenPythonDoes) {
  for (const auto& c : plateau_cases()) {
    const auto optimizer = sgd();
    ReduceLROnPlateau scheduler(*optimizer, c.options);
    const auto& expected = (*oracle_)[c.name];
    for (size_t t = 0; t < c.metrics.size(); ++t) {
      scheduler.step(c.metrics[t]);
      expect_numbers(rates_in(*optimizer), expected["lrs"][t + 1], c.name + ", step " + std::to_string(t + 1));
      EXPECT_EQ(scheduler.last_lr(), rates_in(*optimizer));
    }
    const auto state = scheduler.state_dict();
    for (const auto& [key, value] : expected["state"].items())
      EXPECT_EQ(state.at(key).as_double(), value.get<double>()) << c.name << ", " << key;
  }
}

TEST_P(PythonSchedules, AStateOfPythonsSchedulerContinues) {
  for (const auto& list : {simple_cases(), composite_cases()})
    for (const auto& c : list) {
      if (!c.save_after) continue;
      const auto states = load_checkpoint(oracle_->saved(c.name));
      const auto optimizer = c.make();
      for (auto& group : optimizer->param_groups()) group.options().set_lr(7);  // the states have the rates
      LRScheduler scheduler(*optimizer, c.schedule);
      load_state_dict(*optimizer, states.at("optimizer"));
      scheduler.load_state_dict(states.at("scheduler"));
      expect_as_python(c, *optimizer, scheduler, *c.save_after);
    }
}

TEST_P(PythonSchedules, AStateOfPythonsPlateauContinues) {
  for (const auto& c : plateau_cases()) {
    const auto states = load_checkpoint(oracle_->saved(c.name));
    const auto optimizer = sgd();
    ReduceLROnPlateau scheduler(*optimizer, c.options);
    load_state_dict(*optimizer, states.at("optimizer"));
    scheduler.load_state_dict(states.at("scheduler"));
    EXPECT_EQ(scheduler.last_step(), 4);
    for (size_t t = 4; t < c.metrics.size(); ++t) {
      scheduler.step(c.metrics[t]);
      expect_numbers(rates_in(*optimizer), (*oracle_)[c.name]["lrs"][t + 1], c.name);
    }
  }
}

// --- LRScheduler

Schedule warm_up_then_cosine() {
  return sequential({linear({.start_factor = 0.1, .total_iters = 5}), cosine_annealing({.t_max = 20})}, {5});
}

/// Saves and loads a scheduler as a checkpoint does.
template <class Scheduler>
void copy_state(const Scheduler& from, Scheduler& to) {
  const TemporaryFolder folder;
  const auto path = (folder.path() / "state.pt").string();
  save_checkpoint(path, StateTraits<Scheduler>::save(from));
  StateTraits<Scheduler>::load(to, load_checkpoint(path));
}

TEST(LRScheduler, ContinuesFromItsState) {
  std::vector<Schedule> all;
  for (const auto& list : {simple_cases(), momentum_cases(), composite_cases()})
    for (const auto& c : list) all.push_back(c.schedule);
  for (size_t i = 0; i < all.size(); ++i) {
    const auto optimizer = sgd(), resumed_optimizer = sgd();
    LRScheduler scheduler(*optimizer, all[i]);
    scheduler.step();
    for (auto& group : optimizer->param_groups()) group.options().set_lr(group.options().get_lr() * 0.5);
    scheduler.step();

    for (auto& group : resumed_optimizer->param_groups()) group.options().set_lr(7);  // the state has the base rates
    LRScheduler resumed(*resumed_optimizer, all[i]);
    copy_state(scheduler, resumed);
    load_state_dict(*resumed_optimizer, state_dict(*optimizer));
    EXPECT_EQ(resumed.last_lr(), scheduler.last_lr());
    EXPECT_EQ(resumed.last_step(), 2);
    for (int step = 0; step < 2; ++step) {
      scheduler.step();
      resumed.step();
      EXPECT_EQ(rates_in(*resumed_optimizer), rates_in(*optimizer)) << "schedule " << i;
      EXPECT_EQ(momenta_in(*resumed_optimizer), momenta_in(*optimizer)) << "schedule " << i;
    }
    EXPECT_EQ(resumed.state_dict(), scheduler.state_dict());
  }
}

TEST(LRScheduler, LoadingLeavesTheOptimizerUnchanged) {
  const auto optimizer = sgd(), other = sgd();
  LRScheduler scheduler(*optimizer, warm_up_then_cosine());
  for (int step = 0; step < 7; ++step) scheduler.step();
  LRScheduler loaded(*other, warm_up_then_cosine());
  const auto before = rates_in(*other);
  loaded.load_state_dict(scheduler.state_dict());
  EXPECT_EQ(rates_in(*other), before);
  EXPECT_EQ(loaded.last_lr(), scheduler.last_lr());
}

TEST(LRScheduler, HasPythonsKeys) {
  const auto optimizer = sgd();
  LRScheduler scheduler(*optimizer, exponential({.gamma = 0.5}));
  scheduler.step();
  EXPECT_EQ(scheduler.state_dict(), Value::dict({{"last_epoch", 1},
                                                 {"_step_count", 2},
                                                 {"base_lrs", Value::list({0.1, 0.03})},
                                                 {"_last_lr", Value::list({0.05, 0.015})}}));
}

TEST(LRScheduler, AFailedStepChangesNothing) {
  const auto optimizer = sgd();
  LRScheduler scheduler(*optimizer, one_cycle({.max_lr = 0.5, .total_steps = 3}));
  for (int step = 0; step < 3; ++step) scheduler.step();
  const auto rates = rates_in(*optimizer), momenta = momenta_in(*optimizer);
  expect_error<UsageError>([&] { scheduler.step(); }, "one_cycle", "step 4", "total_steps", "3");
  EXPECT_EQ(rates_in(*optimizer), rates);
  EXPECT_EQ(momenta_in(*optimizer), momenta);
  EXPECT_EQ(scheduler.last_step(), 3);
}

/// Trains with fixed gradients and returns the parameters. `Class` is constructed by `make(parameters)`.
template <class Make>
std::vector<torch::Tensor> trained(const Make& make, const Schedule& schedule) {
  std::vector<torch::Tensor> parameters;
  for (const int64_t size : {5, 3}) parameters.push_back(torch::ones({size}, torch::kDouble).requires_grad_());
  const auto optimizer = make(parameters);
  LRScheduler scheduler(*optimizer, schedule);
  for (int step = 0; step < 8; ++step) {
    for (const auto& parameter : parameters)
      parameter.mutable_grad() = torch::arange(parameter.numel(), torch::kDouble) + step;
    optimizer->step();
    scheduler.step();
  }
  std::vector<torch::Tensor> result;
  for (const auto& parameter : parameters) result.push_back(parameter.detach().clone());
  return result;
}

template <class Class, class Options>
auto maker(const Options& options) {
  return
      [options](const std::vector<torch::Tensor>& parameters) { return std::make_unique<Class>(parameters, options); };
}

void expect_close(const std::vector<torch::Tensor>& actual, const std::vector<torch::Tensor>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(actual[i].allclose(expected[i], 1e-12, 0)) << i;
}

template <class Class, class Fused, class Options>
void expect_same_training(const Options& options) {
  for (const auto& schedule : {warm_up_then_cosine(), one_cycle({.max_lr = 0.3, .total_steps = 9})}) {
    const auto expected = trained(maker<Class>(options), schedule);
    EXPECT_FALSE(trained(maker<Class>(options), constant({.factor = 1}))[0].allclose(expected[0]));
    expect_close(trained(maker<Fused>(options), schedule), expected);
    run_threads(2, [&](ProcessGroup world) {
      const auto sharded = [&](const std::vector<torch::Tensor>& parameters) {
        return std::make_unique<ZeroRedundancyOptimizer<Class>>(parameters, world, options);
      };
      expect_close(trained(sharded, schedule), expected);
    });
  }
}

TEST(LRScheduler, RatesAndMomentaReachFusedAndShardedOptimizers) {
  expect_same_training<torch::optim::SGD, FusedSGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  expect_same_training<torch::optim::Adam, FusedAdam>(torch::optim::AdamOptions(0.1));
  expect_same_training<torch::optim::AdamW, FusedAdamW>(torch::optim::AdamWOptions(0.1));
}

// --- ReduceLROnPlateau

TEST(ReduceLROnPlateau, ContinuesFromItsState) {
  for (const auto& c : plateau_cases()) {
    const auto optimizer = sgd(), resumed_optimizer = sgd();
    ReduceLROnPlateau scheduler(*optimizer, c.options), resumed(*resumed_optimizer, c.options);
    const size_t half = c.metrics.size() / 2;
    for (size_t t = 0; t < half; ++t) scheduler.step(c.metrics[t]);
    copy_state(scheduler, resumed);
    load_state_dict(*resumed_optimizer, state_dict(*optimizer));
    for (size_t t = half; t < c.metrics.size(); ++t) {
      scheduler.step(c.metrics[t]);
      resumed.step(c.metrics[t]);
      EXPECT_EQ(rates_in(*resumed_optimizer), rates_in(*optimizer)) << c.name;
    }
    EXPECT_EQ(resumed.state_dict(), scheduler.state_dict());
  }
}

TEST(ReduceLROnPlateau, RanksDecideByTheMeanOfTheirMetrics) {
  run_threads(3, [](ProcessGroup world) {
    const auto optimizer = sgd(), expected_optimizer = sgd();
    ReduceLROnPlateau scheduler(*optimizer, {.patience = 0, .group = world});
    ReduceLROnPlateau expected(*expected_optimizer, {.patience = 0});
    const Numbers means{3, 2, 4, 1, 1, 1};
    for (const double mean : means) {
      scheduler.step(mean + (world.rank() - 1) * 10);  // on its own, each rank would decide otherwise
      expected.step(mean);
      EXPECT_EQ(rates_in(*optimizer), rates_in(*expected_optimizer));
      EXPECT_EQ(scheduler.best(), expected.best());
    }
    scheduler.step(world.rank() == 1 ? std::nan("") : 0);
    EXPECT_EQ(scheduler.best(), 1) << "a metric that is NaN on one rank is NaN on all";
  });
}

// --- misuse

TEST(Schedules, RefuseOptionsOutOfRange) {
  const double nan = std::nan("");
  expect_error<UsageError>([] { constant({.total_iters = 0}); }, "constant: total_iters is 0, expected 1 or more");
  expect_error<UsageError>([] { constant({.factor = 0}); }, "constant: factor is 0, expected more than 0");
  expect_error<UsageError>([] { constant({.factor = 1.5}); }, "factor is 1.5");
  expect_error<UsageError>([] { linear({.start_factor = 0}); }, "linear: start_factor is 0");
  expect_error<UsageError>([] { linear({.end_factor = 2}); }, "linear: end_factor is 2, expected 0 to 1");
  expect_error<UsageError>([&] { linear({.start_factor = nan}); }, "linear: start_factor is nan");
  expect_error<UsageError>([] { linear({.total_iters = -1}); }, "linear: total_iters is -1");
  expect_error<UsageError>([] { step_decay({}); }, "step_decay: step_size is 0");
  expect_error<UsageError>([] { step_decay({.step_size = 2, .gamma = -1}); }, "step_decay: gamma is -1");
  expect_error<UsageError>([] { multi_step({.milestones = {3, 3}}); }, "multi_step: milestones[1] is 3, expected 4");
  expect_error<UsageError>([] { multi_step({.milestones = {0}}); }, "multi_step: milestones[0] is 0, expected 1");
  expect_error<UsageError>([] { exponential({}); }, "exponential: gamma is 0, expected more than 0");
  expect_error<UsageError>([] { polynomial({.total_iters = 0}); }, "polynomial: total_iters is 0");
  expect_error<UsageError>([] { cosine_annealing({}); }, "cosine_annealing: t_max is 0");
  expect_error<UsageError>([] { cosine_annealing_warm_restarts({}); }, "cosine_annealing_warm_restarts: t_0 is 0");
  expect_error<UsageError>([] { cosine_annealing_warm_restarts({.t_0 = 1, .t_mult = 0}); }, "t_mult is 0");
  expect_error<UsageError>([] { one_cycle({.max_lr = 1}); }, "one_cycle: total_steps is not set", "steps_per_epoch");
  expect_error<UsageError>([] { one_cycle({.total_steps = 9}); }, "one_cycle: max_lr is not set");
  expect_error<UsageError>([] { one_cycle({.max_lr = 1, .total_steps = -9}); }, "one_cycle: total_steps is -9");
  expect_error<UsageError>([] { one_cycle({.max_lr = 1, .epochs = 9}); }, "one_cycle: steps_per_epoch is 0");
  expect_error<UsageError>([] { one_cycle({.max_lr = 1, .total_steps = 9, .pct_start = 2}); }, "pct_start is 2");
  expect_error<UsageError>([] { one_cycle({.max_lr = 1, .total_steps = 9, .max_momentum = 1}); }, "max_momentum is 1");
  expect_error<UsageError>([] { cyclic({.base_lr = 1}); }, "cyclic: max_lr is not set");
  expect_error<UsageError>([] { cyclic({.base_lr = 1, .max_lr = 2, .step_size_down = 0}); }, "step_size_down is 0");
  expect_error<UsageError>([] { lambda(Factor{}); }, "lambda: a function is empty");
  expect_error<UsageError>([] { swa({}); }, "swa: swa_lr is not set");
  expect_error<UsageError>([] { swa({.swa_lr = 1, .anneal_epochs = -1}); }, "swa: anneal_epochs is -1");
  expect_error<UsageError>([] { chained({}); }, "chained: there are 0 schedules");
  const auto one = exponential({.gamma = 0.9});
  expect_error<UsageError>([&] { sequential({one, one}, {}); }, "2 schedules and 0 milestones, expected 1");
  expect_error<UsageError>([&] { sequential({one, one, one}, {5, 5}); }, "sequential: milestones[1] is 5, expected 6");
  expect_error<UsageError>([] { Schedule(nullptr); }, "null");
}

TEST(Schedules, PhasesOfOneCycleMayHaveNoLength) {
  const auto optimizer = sgd();
  const OneCycleOptions options{.max_lr = 0.5, .total_steps = 10, .pct_start = 0.1};  // Python divides by zero
  LRScheduler scheduler(*optimizer, one_cycle(options));
  EXPECT_EQ(rates_in(*optimizer), (Numbers{0.5, 0.5}));
  for (int step = 0; step < 9; ++step) scheduler.step();
  EXPECT_NEAR(rates_in(*optimizer)[0], 0.5 / 25 / 1e4, 1e-15);
}

TEST(LRScheduler, RefusesWhatDoesNotFitTheOptimizer) {
  const auto optimizer = sgd();
  const auto refuse = [&](const Schedule& schedule, const auto&... parts) {
    expect_error<UsageError>([&] { LRScheduler(*optimizer, schedule); }, parts...);
    EXPECT_EQ(rates_in(*optimizer), (Numbers{0.1, 0.03}));
  };
  const auto half = [](int64_t) { return 0.5; };
  refuse(one_cycle({.max_lr = {1, 2, 3}, .total_steps = 9}), "one_cycle: max_lr has 3 numbers", "2 parameter groups");
  refuse(lambda(std::vector<Factor>{half}), "lambda has 1 functions", "2 parameter groups");
  refuse(chained({exponential({.gamma = 0.5}), swa({.swa_lr = {0.1, 0.2, 0.3}})}), "swa: swa_lr has 3 numbers");
  expect_error<UsageError>([&] { ReduceLROnPlateau(*optimizer, {.min_lr = {0.1}}); }, "min_lr has 1 numbers");
  expect_error<UsageError>([&] { ReduceLROnPlateau(*optimizer, {.factor = 1}); }, "factor is 1, expected at least 0");
  expect_error<UsageError>([&] { ReduceLROnPlateau(*optimizer, {.patience = -1}); }, "patience is -1");

  const auto adagrad = two_groups<torch::optim::Adagrad>(torch::optim::AdagradOptions(1));
  const OneCycleOptions cycle{.max_lr = 1, .total_steps = 9};
  expect_error<UsageError>(
      [&] {
        LRScheduler(*adagrad, sequential({exponential({.gamma = 0.5}), one_cycle(cycle)}, {3}));
      },
      "SGD, RMSprop, Adam or AdamW", "cycle_momentum = false");
  EXPECT_EQ(rates_in(*adagrad), (Numbers{0.1, 0.03}));
  LRScheduler(*adagrad, one_cycle({.max_lr = 1, .total_steps = 9, .cycle_momentum = false}));
}

TEST(LRScheduler, RefusesAGroupThatWasAddedLater) {
  const auto optimizer = sgd();
  LRScheduler scheduler(*optimizer, exponential({.gamma = 0.5}));
  ReduceLROnPlateau plateau(*optimizer);
  optimizer->add_param_group(torch::optim::OptimizerParamGroup({torch::zeros({1}).requires_grad_()}));
  expect_error<UsageError>([&] { scheduler.step(); }, "LRScheduler", "has 3 parameter groups", "had 2");
  expect_error<UsageError>([&] { plateau.step(1); }, "ReduceLROnPlateau", "has 3 parameter groups", "had 2");
}

TEST(LRScheduler, RefusesAStateThatDoesNotFit) {
  const auto optimizer = sgd();
  LRScheduler scheduler(*optimizer, exponential({.gamma = 0.5}));
  ReduceLROnPlateau plateau(*optimizer);
  const auto before = scheduler.state_dict(), plateau_before = plateau.state_dict();
  auto refuse = [&](auto& refusing, const char* key, const Value& value, const auto&... parts) {
    auto state = refusing.state_dict();
    state.set(key, value);
    expect_error<UsageError>([&] { refusing.load_state_dict(state); }, parts...);
  };
  refuse(scheduler, "base_lrs", Value::list({0.1}), "base_lrs", "1 parameter groups", "the optimizer has 2");
  refuse(scheduler, "_last_lr", Value::list({0.1, 0.1, 0.1}), "_last_lr", "3 parameter groups");
  refuse(scheduler, "last_epoch", -1, "last_epoch of the state is -1");
  refuse(scheduler, "last_epoch", "three", "int");
  refuse(plateau, "_last_lr", Value::list({0.1}), "ReduceLROnPlateau", "_last_lr", "1 parameter groups");
  expect_error<UsageError>([&] { scheduler.load_state_dict(Value::dict({{"last_epoch", 3}})); }, "base_lrs");
  EXPECT_EQ(scheduler.state_dict(), before);
  EXPECT_EQ(plateau.state_dict(), plateau_before);
}

}  // namespace
}  // namespace lockstep::schedules
