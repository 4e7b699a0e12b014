#include <lockstep/optimizer_state.h>

#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>

#include "optim/stepping.h"
#include "support/messages.h"

namespace lockstep {
namespace {

using namespace torch::optim;

void train(Optimizer& optimizer, const std::vector<torch::Tensor>& parameters, int begin, int end) {
  for (int step = begin; step < end; ++step) {
    set_gradients(parameters, step);
    optimizer.step();
  }
}

template <class Theirs, class Options>
void expect_to_go_on(Options options, const std::vector<std::string>& names) {
  for (auto device : devices_under_test()) {
    const auto parameters = make_parameters(torch::kDouble, device), copies = make_parameters(torch::kDouble, device);
    Theirs first(parameters, options), second(copies, Options(options).lr(77));
    train(first, parameters, 1, 4);
    const auto state = state_dict(first);
    ASSERT_EQ(state["param_groups"].size(), 1u);
    EXPECT_EQ(state["param_groups"][0]["params"].size(), parameters.size());
    EXPECT_EQ(state["param_groups"][0]["lr"].as_double(), options.lr());
    ASSERT_EQ(state["state"].size(), parameters.size());
    for (const auto& name : names) EXPECT_EQ(state["state"][3][name].tensor().sizes(), parameters[3].sizes()) << name;

    load_state_dict(second, state);
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < copies.size(); ++i) copies[i].copy_(parameters[i]);
    }
    train(first, parameters, 4, 7);  // does not change what the other has loaded
    train(second, copies, 4, 7);
    expect_equal(copies, parameters, 0, names.front());
  }
}

TEST(OptimizerState, GoesFromOneOptimizerToAnother) {
  expect_to_go_on<SGD>(SGDOptions(0.1).momentum(0.9), {"momentum_buffer"});
  expect_to_go_on<Adam>(AdamOptions(0.1).amsgrad(true), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"});
  expect_to_go_on<AdamW>(AdamWOptions(0.1), {"exp_avg", "exp_avg_sq"});
  expect_to_go_on<RMSprop>(RMSpropOptions(0.1).centered(true).momentum(0.5),
                           {"square_avg", "momentum_buffer", "grad_avg"});
  expect_to_go_on<Adagrad>(AdagradOptions(0.1), {"sum"});
  expect_to_go_on<FusedAdamW>(AdamWOptions(0.1), {"exp_avg", "exp_avg_sq"});
  expect_to_go_on<FusedAdam>(AdamOptions(0.1), {"exp_avg", "exp_avg_sq"});
  expect_to_go_on<FusedSGD>(SGDOptions(0.1).momentum(0.9), {"momentum_buffer"});
}

TEST(OptimizerState, HasStepsAsPythonHas) {
  const auto parameter = torch::ones({3}, torch::requires_grad());
  AdamW optimizer({parameter});
  EXPECT_EQ(state_dict(optimizer)["state"].size(), 0u);
  for (int step = 0; step < 3; ++step) {
    parameter.mutable_grad() = torch::ones({3});
    optimizer.step();
  }
  auto state = state_dict(optimizer);
  const auto step = state["state"][0]["step"].tensor();
  EXPECT_EQ(step.scalar_type(), torch::kFloat);
  EXPECT_EQ(step.dim(), 0);
  EXPECT_EQ(step.item<float>(), 3);
  EXPECT_EQ(state["param_groups"][0]["betas"][0].as_double(), 0.9);

  // Older ones of Python have numbers, and options may be tensors or whole numbers.
  state["state"][0]["step"] = 5.0;
  state["param_groups"][0]["lr"] = torch::tensor(0.25);
  state["param_groups"][0]["weight_decay"] = 0;
  state["param_groups"][0].set("foreach", nullptr);
  load_state_dict(optimizer, state);
  EXPECT_EQ(state_dict(optimizer)["state"][0]["step"].tensor().item<float>(), 5);
  const auto& options = static_cast<AdamWOptions&>(optimizer.param_groups()[0].options());
  EXPECT_EQ(options.lr(), 0.25);
  EXPECT_EQ(options.weight_decay(), 0);
}

TEST(OptimizerState, MayLieOtherwiseInMemoryThanTheParameters) {
  for (auto device : devices_under_test()) {
    const auto parameters = make_parameters(torch::kDouble, device), copies = make_parameters(torch::kDouble, device);
    FusedAdamW first(parameters, 0.1), second(copies, 0.1);
    train(first, parameters, 1, 3);
    train(second, copies, 1, 3);
    auto state = state_dict(first);
    for (auto& [parameter, values] : state["state"].items())
      for (auto& [name, value] : values.items()) value = value.tensor().contiguous();
    load_state_dict(second, state);
    train(first, parameters, 3, 5);
    train(second, copies, 3, 5);
    expect_equal(copies, parameters, 0, device.str());
  }
}

TEST(OptimizerState, TakesWhatPythonMayWrite) {
  const auto parameter = torch::ones({3}, torch::requires_grad()), other = torch::ones({2}, torch::requires_grad());
  for (const auto& one : {parameter, other}) one.mutable_grad() = torch::ones_like(one);
  AdamW adam({parameter, other});
  adam.step();
  auto state = state_dict(adam);
  state["state"].erase(1);  // it was not stepped there
  state["state"][0]["exp_avg"] = torch::full({3}, 0.5, torch::kDouble);
  state["param_groups"][0]["betas"] = Value::tuple({0, 0.75});
  load_state_dict(adam, state);
  EXPECT_EQ(static_cast<AdamWOptions&>(adam.param_groups()[0].options()).betas(), std::make_tuple(0.0, 0.75));
  const auto loaded = state_dict(adam);
  EXPECT_EQ(loaded["state"].size(), 1u);
  EXPECT_EQ(loaded["state"][0]["exp_avg"].tensor().scalar_type(), torch::kFloat);
  EXPECT_EQ(loaded["state"][0]["exp_avg"].tensor()[1].item<float>(), 0.5);

  SGD sgd({parameter, other}, SGDOptions(0.1));
  auto nothing = state_dict(sgd);
  nothing["state"].set(0, Value::dict({{"momentum_buffer", nullptr}}));
  load_state_dict(sgd, nothing);
  EXPECT_EQ(state_dict(sgd)["state"].size(), 0u);
}

TEST(OptimizerState, OfAnotherOptimizerIsRefusedAndTheOldOneStays) {
  const auto parameter = torch::ones({3}, torch::requires_grad());
  parameter.mutable_grad() = torch::ones({3});
  AdamW adam({parameter});
  SGD sgd({parameter}, SGDOptions(0.1).momentum(0.9));
  Adagrad adagrad({parameter});
  for (Optimizer* optimizer :
       {static_cast<Optimizer*>(&adam), static_cast<Optimizer*>(&sgd), static_cast<Optimizer*>(&adagrad)})
    optimizer->step();
  expect_error<UsageError>([&] { load_state_dict(adam, state_dict(sgd)); }, "parameter 0", "no 'step'", "another kind");
  expect_error<UsageError>([&] { load_state_dict(adam, state_dict(adagrad)); }, "no 'exp_avg'");
  expect_error<UsageError>([&] { load_state_dict(sgd, state_dict(adam)); }, "no 'momentum_buffer'");
  auto odd = state_dict(adam);
  odd["state"][0]["exp_avg"] = "text";
  EXPECT_THROW(load_state_dict(adam, odd), c10::Error);
  EXPECT_EQ(state_dict(adam)["state"][0]["step"].tensor().item<float>(), 1) << "as before";
}

TEST(OptimizerState, OfAnotherModelIsRefused) {
  const auto small = torch::ones({3}, torch::requires_grad()), large = torch::ones({4}, torch::requires_grad());
  small.mutable_grad() = torch::ones({3});
  AdamW of_small({small}), of_large({large}), of_both({small, large});
  of_small.step();
  auto state = state_dict(of_small);
  expect_error<UsageError>([&] { load_state_dict(of_large, state); }, "'exp_avg' of parameter 0", "[3]", "[4]",
                           "another model");
  state["param_groups"][0].set("param_names", Value::list({"head.bias"}));
  expect_error<UsageError>([&] { load_state_dict(of_large, state); }, "parameter 'head.bias'");
  expect_error<UsageError>([&] { load_state_dict(of_both, state); }, "has 1 parameters in the state",
                           "2 in the optimizer");
  state["param_groups"][0].set("maximize", true);
  expect_error<UsageError>([&] { load_state_dict(of_small, state); }, "maximize = true");
  state["param_groups"].elements().push_back(Value::dict({{"params", Value::list()}}));
  expect_error<UsageError>([&] { load_state_dict(of_small, state); }, "2 parameter groups", "has 1");
  EXPECT_EQ(state_dict(of_small)["state"][0]["step"].tensor().item<float>(), 1);
}

}  // namespace
}  // namespace lockstep
