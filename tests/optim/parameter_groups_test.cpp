#include <lockstep/parameter_groups.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using torch::optim::AdamWOptions;
using Groups = std::vector<torch::optim::OptimizerParamGroup>;

/// The names of the parameters in each group.
std::vector<std::vector<std::string>> names_in(const Groups& groups, const torch::nn::Module& model) {
  std::vector<std::vector<std::string>> names;
  for (const auto& group : groups) {
    names.emplace_back();
    for (const auto& parameter : group.params())
      for (const auto& item : model.named_parameters())
        if (item.value().is_same(parameter)) names.back().push_back(item.key());
  }
  return names;
}

double decay_of(const torch::optim::OptimizerParamGroup& group) {
  return static_cast<const AdamWOptions&>(group.options()).weight_decay();
}

TEST(ParameterGroups, HoldWhatTheFirstMatchingRuleSays) {
  Mlp model;
  const auto groups = parameter_groups(model->named_parameters(),
                                       {{.pattern = "third.*", .options = AdamWOptions(1e-2)},
                                        {.pattern = "*.bias", .options = AdamWOptions(2e-3).weight_decay(0)}});
  const std::vector<std::vector<std::string>> expected{
      {"third.weight", "third.bias"}, {"first.bias", "second.bias"}, {"first.weight", "second.weight"}};
  EXPECT_EQ(names_in(groups, *model), expected);
  EXPECT_EQ(groups[0].options().get_lr(), 1e-2);
  EXPECT_EQ(decay_of(groups[1]), 0);
  EXPECT_FALSE(groups[2].has_options()) << "an optimizer then sets its defaults";

  FusedAdamW optimizer(groups, AdamWOptions(1e-4).weight_decay(0.5));
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 2e-3);
  EXPECT_EQ(decay_of(optimizer.param_groups()[1]), 0);
  EXPECT_EQ(optimizer.param_groups()[2].options().get_lr(), 1e-4);
  EXPECT_EQ(decay_of(optimizer.param_groups()[2]), 0.5);
}

TEST(ParameterGroups, MatchWholeNames) {
  auto is_matched = [](const std::string& pattern, const std::string& name) {
    const auto parameter = torch::ones({1}, torch::requires_grad());
    const auto other = torch::ones({1}, torch::requires_grad());
    try {
      const std::vector<std::pair<std::string, torch::Tensor>> parameters{{name, parameter}, {"\n", other}};
      return parameter_groups(parameters, {{pattern, AdamWOptions(1)}})[0].params()[0].is_same(parameter);
    } catch (const UsageError&) {
      return false;
    }
  };
  for (const char* pattern : {"layers.0.bias", "*", "*.bias", "layers.*", "layers.?.bias", "l*s.*.b*s", "**bias",
                              "*layers.0.bias*", "*a*a*", "?????????????", "*s"})
    EXPECT_TRUE(is_matched(pattern, "layers.0.bias")) << pattern;
  for (const char* pattern : {"", "bias", "layers", "layers.?", "*.bias?", "?layers.0.bias", "layers.0.biaz", "*b",
                              "layers.0.bias.*", "*s.b*", "????????????", "[l]ayers.0.bias", "layers.00.bias"})
    EXPECT_FALSE(is_matched(pattern, "layers.0.bias")) << pattern;
  EXPECT_TRUE(is_matched("*ab", "aab"));
  EXPECT_TRUE(is_matched("a*b*c", "abbbcc"));
  EXPECT_TRUE(is_matched("w[0]", "w[0]")) << "brackets stand for themselves";
}

TEST(ParameterGroups, LeaveOutFrozenAndRepeatedParameters) {
  Mlp model;
  model->first->weight.requires_grad_(false);
  for (auto& parameter : model->third->parameters()) parameter.requires_grad_(false);
  model->register_module("fourth", model->second);
  const auto groups = parameter_groups(model->named_parameters(), {{.pattern = "third.*", .options = AdamWOptions(1)},
                                                                   {.pattern = "*.bias", .options = AdamWOptions(2)}});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].params().size(), 2u);  // the biases of first and second, which has two names
  EXPECT_EQ(groups[0].options().get_lr(), 2);
  EXPECT_EQ(groups[1].params().size(), 1u);
  EXPECT_TRUE(groups[1].params()[0].is_same(model->second->weight));
  for (auto& parameter : model->parameters()) parameter.requires_grad_(false);
  expect_error<UsageError>([&] { parameter_groups(model->named_parameters(), {}); }, "none of the", "gradient");
}

TEST(ParameterGroups, RefuseARuleThatDecidesNothing) {
  Mlp model;
  const auto parameters = model->named_parameters();
  expect_error<UsageError>(
      [&] {
        parameter_groups(parameters, {{"*.bais", AdamWOptions(1)}});
      },
      "'*.bais'", "matches no parameter", "first.weight, first.bias");
  expect_error<UsageError>(
      [&] {
        parameter_groups(parameters, {{"*.bias", AdamWOptions(1)}, {"first.bias", AdamWOptions(2)}});
      },
      "'first.bias'", "earlier rules", "put this rule before");
  std::vector<std::pair<std::string, torch::Tensor>> many;
  for (int i = 0; i < 100; ++i) many.emplace_back("p" + std::to_string(i), torch::ones({1}, torch::requires_grad()));
  expect_error<UsageError>([&] { parameter_groups(many, {{"q*", AdamWOptions(1)}}); }, "p7 and 92 more");
}

TEST(ParameterGroups, DecayMatricesOnly) {
  ConvNet model;
  const auto options = AdamWOptions(1e-3).weight_decay(0.1).betas({0.8, 0.9});
  const auto groups = weight_decay_groups(model->named_parameters(), options);
  const std::vector<std::vector<std::string>> expected{{"conv.weight", "head.weight"},
                                                       {"norm.weight", "norm.bias", "head.bias"}};
  EXPECT_EQ(names_in(groups, *model), expected);
  EXPECT_EQ(decay_of(groups[0]), 0.1);
  EXPECT_EQ(decay_of(groups[1]), 0);
  EXPECT_EQ(static_cast<const AdamWOptions&>(groups[1].options()).betas(), std::make_tuple(0.8, 0.9));
  EXPECT_EQ(groups[1].options().get_lr(), 1e-3);
  torch::nn::BatchNorm1d norm(3);
  EXPECT_EQ(weight_decay_groups(norm->named_parameters(), options).size(), 1u);
}

/// The default of SGD's and Adam's options is no decay, which some versions of LibTorch take for "not set".
template <class Optimizer, class Options>
void expect_no_decay_of_biases(Options options) {
  for (auto dtype : {torch::kFloat, torch::kDouble}) {
    torch::nn::Linear model(2, 2);
    model->to(dtype);
    fill_parameters(*model, 1);
    const auto weight = model->weight.detach().clone(), bias = model->bias.detach().clone();
    options.weight_decay(0.5);
    Optimizer optimizer(weight_decay_groups(model->named_parameters(), options), options);
    for (auto& parameter : model->parameters()) parameter.mutable_grad() = torch::zeros_like(parameter);
    optimizer.step();
    EXPECT_FALSE(model->weight.equal(weight));
    EXPECT_TRUE(model->bias.equal(bias)) << model->bias << " was " << bias;
  }
}

TEST(ParameterGroups, LeaveBiasesAloneWithEveryOptimizer) {
  expect_no_decay_of_biases<torch::optim::SGD>(torch::optim::SGDOptions(0.1));
  expect_no_decay_of_biases<torch::optim::Adam>(torch::optim::AdamOptions(0.1));
  expect_no_decay_of_biases<torch::optim::AdamW>(AdamWOptions(0.1));
  expect_no_decay_of_biases<FusedAdamW>(AdamWOptions(0.1));
}

TEST(ParameterGroups, TrainAWrappedModel) {
  on_every_rank("shm", 2, [](const ProcessGroup& world) {
    Mlp net, alone;
    for (auto model : {net, alone}) fill_parameters(*model, 1);
    DistributedDataParallel ddp(net, world);
    const auto options = AdamWOptions(0.01).weight_decay(0.5);
    ZeroRedundancyOptimizer<FusedAdamW> optimizer(weight_decay_groups(ddp.named_parameters(), options), world, options);
    torch::optim::AdamW optimizer_alone(weight_decay_groups(alone->named_parameters(), options), options);
    const auto input = torch::ones({2, 6});
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      optimizer_alone.zero_grad();
      ddp(input).square().mean().backward();
      alone(input).square().mean().backward();
      optimizer.step();
      optimizer_alone.step();
    }
    for (size_t i = 0; i < net->parameters().size(); ++i)
      EXPECT_LE(relative_difference(net->parameters()[i], alone->parameters()[i]), 1e-5);
  });
}

}  // namespace
}  // namespace lockstep
