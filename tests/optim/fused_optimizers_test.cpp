#include <lockstep/fused_optimizers.h>

#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "optim/stepping.h"
#include "support/messages.h"

namespace lockstep {
namespace {

using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

// Learning rates that float32 has exactly: on a GPU they are of that.
constexpr double kRate = 1.0 / 64;

const std::vector<AdamWOptions> kAdamWOptions{AdamWOptions(kRate), AdamWOptions(kRate / 4).weight_decay(0).eps(1e-3),
                                              AdamWOptions(kRate).betas({0.7, 0.9}).weight_decay(0.2).amsgrad(true)};
const std::vector<AdamOptions> kAdamOptions{AdamOptions(kRate), AdamOptions(kRate / 4).weight_decay(0.1).eps(1e-3),
                                            AdamOptions(kRate).betas({0.7, 0.9}).weight_decay(0.2).amsgrad(true)};
const std::vector<SGDOptions> kSgdOptions{SGDOptions(8 * kRate), SGDOptions(8 * kRate).weight_decay(0.1),
                                          SGDOptions(8 * kRate).momentum(0.9).dampening(0.3).weight_decay(0.01),
                                          SGDOptions(8 * kRate).momentum(0.8).nesterov(true).weight_decay(0.01)};

/// Two groups of parameters, of which the second has another learning rate.
template <class Optimizer, class Options>
std::unique_ptr<Optimizer> make(const std::vector<torch::Tensor>& parameters, Options options) {
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<torch::Tensor>(parameters.begin(), parameters.begin() + 2));
  groups.emplace_back(std::vector<torch::Tensor>(parameters.begin() + 2, parameters.end()),
                      std::make_unique<Options>(Options(options).lr(options.lr() / 2)));
  return std::make_unique<Optimizer>(std::move(groups), options);
}

void change_rate(torch::optim::Optimizer& optimizer, double factor) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() * factor);
}

template <class Theirs, class Ours, class Options>
void expect_the_same_steps(const std::vector<Options>& all_options) {
  for (auto device : devices_under_test())
    for (auto dtype : {torch::kDouble, torch::kFloat})
      for (size_t i = 0; i < all_options.size(); ++i) {
        const auto expected = make_parameters(dtype, device), actual = make_parameters(dtype, device);
        const auto theirs = make<Theirs>(expected, all_options[i]);
        const auto ours = make<Ours>(actual, all_options[i]);
        for (int step = 0; step < 7; ++step) {
          set_gradients(expected, step);
          set_gradients(actual, step);
          theirs->step();
          ours->step();
          if (step == 3) change_rate(*theirs, 0.25), change_rate(*ours, 0.25);
        }
        expect_equal(actual, expected, tolerance_of(dtype),
                     device.str() + " " + c10::toString(dtype) + ", options " + std::to_string(i));
      }
}

TEST(FusedOptimizers, StepAsLibTorchsDo) {
  expect_the_same_steps<torch::optim::AdamW, FusedAdamW>(kAdamWOptions);
  expect_the_same_steps<torch::optim::Adam, FusedAdam>(kAdamOptions);
  expect_the_same_steps<torch::optim::SGD, FusedSGD>(kSgdOptions);
}

TEST(FusedOptimizers, ComputeNarrowDtypesInFloat) {
  for (auto device : devices_under_test())
    for (auto [dtype, tolerance] : {std::pair(torch::kBFloat16, 1e-2), std::pair(torch::kHalf, 2e-3)}) {
      auto narrow = numbers({500}, 1, dtype).to(device).requires_grad_();
      auto wide = narrow.detach().to(torch::kFloat).requires_grad_();
      FusedAdamW adam({narrow}, AdamWOptions(1e-2));
      torch::optim::AdamW theirs({wide}, AdamWOptions(1e-2));
      for (int step = 0; step < 4; ++step) {
        narrow.mutable_grad() = numbers({500}, 100 + step, dtype).to(device);
        wide.mutable_grad() = narrow.grad().to(torch::kFloat);
        adam.step();
        theirs.step();
      }
      EXPECT_LE(relative_difference(narrow, wide), tolerance) << device << ' ' << dtype;
      FusedSGD sgd({narrow}, SGDOptions(0.1).momentum(0.9));
      const auto before = narrow.detach().to(torch::kFloat);
      sgd.step();
      EXPECT_LE(relative_difference(narrow, before - 0.1 * narrow.grad().to(torch::kFloat)), tolerance);
    }
}

/// LibTorch's archives are ours, in both directions.
template <class From, class To, class Options>
void expect_fused_to_go_on(Options options) {
  for (auto device : devices_under_test()) {
    const auto parameters = make_parameters(torch::kDouble, device), copies = make_parameters(torch::kDouble, device);
    From first(parameters, options);
    for (int step = 0; step < 3; ++step) {
      set_gradients(parameters, step);
      first.step();
    }
    std::stringstream archive;
    torch::save(first, archive);
    To second(copies, options);
    set_gradients(copies, 0);
    second.step();  // what it has counted so far is forgotten
    torch::load(second, archive);
    {
      torch::NoGradGuard no_grad;
      for (size_t i = 0; i < copies.size(); ++i) copies[i].copy_(parameters[i]);
    }
    for (int step = 3; step < 6; ++step) {
      set_gradients(parameters, step);
      set_gradients(copies, step);
      first.step();
      second.step();
    }
    expect_equal(copies, parameters, 1e-12, device.str());
  }
}

TEST(FusedOptimizers, ReadAndWriteLibTorchsArchives) {
  expect_fused_to_go_on<torch::optim::AdamW, FusedAdamW>(AdamWOptions(kRate).amsgrad(true));
  expect_fused_to_go_on<FusedAdamW, torch::optim::AdamW>(AdamWOptions(kRate).amsgrad(true));
  expect_fused_to_go_on<torch::optim::Adam, FusedAdam>(AdamOptions(kRate));
  expect_fused_to_go_on<FusedAdam, torch::optim::Adam>(AdamOptions(kRate));
  expect_fused_to_go_on<torch::optim::SGD, FusedSGD>(SGDOptions(kRate).momentum(0.9));
  expect_fused_to_go_on<FusedSGD, torch::optim::SGD>(SGDOptions(kRate).momentum(0.9));
}

TEST(FusedOptimizers, EvaluateAClosureAndFollowASchedule) {
  const auto parameter = torch::ones({3}, torch::requires_grad());
  FusedSGD optimizer({parameter}, SGDOptions(0.5));
  torch::optim::StepLR schedule(optimizer, 1, 0.1);
  const auto loss = optimizer.step([&] {
    optimizer.zero_grad();
    auto loss = parameter.sum();
    loss.backward();
    return loss;
  });
  EXPECT_EQ(loss.item<double>(), 3);
  EXPECT_TRUE(torch::allclose(parameter, torch::full({3}, 0.5)));
  schedule.step();
  schedule.step();
  const double rate = optimizer.param_groups()[0].options().get_lr();
  EXPECT_LT(rate, 0.1);
  optimizer.step();
  EXPECT_TRUE(torch::allclose(parameter, torch::full({3}, 0.5 - rate)));
}

TEST(FusedOptimizers, AutogradNoticesThatAParameterChanged) {
  const auto parameter = torch::ones({3}, torch::requires_grad());
  const auto loss = parameter.square().sum();
  loss.backward({}, /*retain_graph=*/true);
  FusedAdamW({parameter}).step();
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(FusedOptimizers, BeginAnewWhereTheStateIsGone) {
  for (auto device : devices_under_test()) {
    const auto parameter = torch::ones({3}, torch::device(device).requires_grad(true));
    FusedAdamW optimizer({parameter}, AdamWOptions(kRate).weight_decay(0));
    auto step = [&] {
      parameter.mutable_grad() = torch::ones({3}, device);
      optimizer.step();
    };
    for (int i = 0; i < 5; ++i) step();
    optimizer.state().clear();
    const auto before = parameter.detach().clone();
    step();
    EXPECT_TRUE(torch::allclose(before - parameter, torch::full({3}, kRate, device), 1e-4)) << "the first step again";
    static_cast<AdamWOptions&>(optimizer.param_groups()[0].options()).amsgrad(true);
    step();
    std::stringstream archive;
    torch::save(optimizer, archive);
    EXPECT_EQ(static_cast<torch::optim::AdamWParamState&>(*optimizer.state().begin()->second).step(), 2);
    EXPECT_TRUE(
        static_cast<torch::optim::AdamWParamState&>(*optimizer.state().begin()->second).max_exp_avg_sq().defined());
  }
}

TEST(FusedOptimizers, RefuseWhatTheyCannotStepBeforeAnythingChanges) {
  const auto good = torch::ones({3}, torch::requires_grad());
  const auto table = torch::ones({4, 2}, torch::requires_grad());
  torch::embedding(table, torch::tensor({1, 1}), -1, false, /*sparse=*/true).sum().backward();
  good.sum().backward();
  FusedAdamW adam({good, table});
  FusedSGD sgd({good, table}, SGDOptions(0.1));
  for (torch::optim::Optimizer* optimizer :
       {static_cast<torch::optim::Optimizer*>(&adam), static_cast<torch::optim::Optimizer*>(&sgd)})
    expect_error<UsageError>([&] { optimizer->step(); }, "parameter 1 of group 0", "[4, 2]", "sparse");
  EXPECT_TRUE(torch::equal(good, torch::ones({3})));
  EXPECT_TRUE(adam.state().empty());

  FusedAdam twice({good, good});
  expect_error<UsageError>([&] { twice.step(); }, "parameter 1 of group 0", "twice", "ddp.parameters()");
  EXPECT_TRUE(torch::equal(good, torch::ones({3})));

  const auto complex = torch::ones({2}, torch::dtype(torch::kComplexFloat).requires_grad(true));
  complex.mutable_grad() = torch::ones({2}, torch::kComplexFloat);
  FusedAdam of_complex({complex});
  expect_error<UsageError>([&] { of_complex.step(); }, "ComplexFloat", "Float, Double, Half or BFloat16");
}

}  // namespace
}  // namespace lockstep
