// Snippets of the page about optimizers.

#include <gmock/gmock.h>

#include "fragments.h"

namespace {

using torch::optim::AdamWOptions;

// --- optimizers

/// Expects a step as that of LibTorch's AdamW in one process.
void expect_adamw(torch::optim::Optimizer& optimizer, auto& ddp, const Net& net, const lockstep::ProcessGroup& world) {
  auto alone = seeded_net();
  torch::optim::AdamW expected(alone->parameters(), AdamWOptions(1e-3));
  for (int i = 0; i < 2; ++i) {
    step(ddp, optimizer, Samples().of_rank(world.rank()));
    step(alone, expected, Samples().slice(0, 24));
  }
  expect_equal_parameters(net, alone);
}

TEST(OptimizersPage, AFusedStepIsThatOfLibTorch) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
#include "docs/optimizers/optimizers.inc"
    expect_adamw(optimizer, ddp, net, world);
  });
}

TEST(OptimizersPage, AShardedStepIsThatOfLibTorch) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
#include "docs/optimizers/optimizers_2.inc"
    expect_adamw(optimizer, ddp, net, world);
    EXPECT_EQ(world.all_reduce(optimizer.state_bytes()), 8 * (6 * 4 + 4)) << "8 bytes for each parameter, on one rank";
  });
}

TEST(OptimizersPage, ParametersAreUpdatedDuringBackward) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto model = seeded_net();
#include "docs/optimizers/updates_during_backward.inc"
    expect_adamw(optimizer, ddp, model, world);
    EXPECT_FALSE(ddp.parameters()[0].grad().defined());
  });
}

TEST(OptimizersPage, ShardedGradientsAreClipped) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto model = seeded_net();
    lockstep::DistributedDataParallel ddp(model, world);
    const auto before = model->layer->weight.detach().clone();
    std::vector<torch::Tensor> loader(2, torch::ones({3, 6}) * 100);
    const auto loss_of = [](auto& wrapper, const torch::Tensor& batch) { return wrapper(batch).square().sum(); };
#include "docs/optimizers/updates_during_backward_2.inc"
    EXPECT_FALSE(torch::equal(model->layer->weight, before));
    ddp.check_replicas();
  });
}

TEST(OptimizersPage, RanksShareTheirParameters) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto model = seeded_net();
#include "docs/optimizers/one_copy_of_the_parameters_per_host.inc"
    expect_adamw(optimizer, ddp, model, world);
    EXPECT_FALSE(ddp.parameters()[0].grad().defined());
  });
}

TEST(OptimizersPage, AShardedOptimizerTakesParametersNamesAndGroups) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto model = seeded_net();
    lockstep::DistributedDataParallel ddp(model, world);
    const AdamWOptions options(1e-3);
    const std::vector<torch::optim::OptimizerParamGroup> groups{
        torch::optim::OptimizerParamGroup({model->layer->weight}),
        torch::optim::OptimizerParamGroup({model->layer->bias})};
#include "docs/optimizers/zeroredundancyoptimizer.inc"
    EXPECT_EQ(optimizer.param_groups().size(), 1);
    EXPECT_EQ(separate.param_groups().size(), 1);
    step(ddp, grouped, Samples().of_rank(world.rank()));
    const auto state = grouped.consolidated_state_dict(0);
    if (world.rank() == 0) {
      EXPECT_EQ(state["param_groups"][0]["param_names"][0].as_string(), "layer.weight");
      EXPECT_EQ(state["param_groups"][1]["param_names"][0].as_string(), "layer.bias");
    }
  });
}

TEST(OptimizersPage, AStateLoadsOnEveryRank) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
    using Optimizer = lockstep::ZeroRedundancyOptimizer<lockstep::FusedAdamW>;
    const auto weights = [&](Optimizer& optimizer) {
      step(ddp, optimizer, Samples().of_rank(world.rank()));
      return torch::nn::utils::parameters_to_vector(net->parameters()).detach().clone();
    };
    Tensor expected, before;
    {
      Optimizer optimizer(ddp.parameters(), world, AdamWOptions(1e-3));
      before = weights(optimizer);
#include "docs/optimizers/its_state.inc"
      EXPECT_EQ(state.is_none(), world.rank() != 0);
      if (world.rank() == 0) {
        EXPECT_EQ(state["state"].size(), 2);
      }
      expected = weights(optimizer);
    }
    world.barrier();
    torch::NoGradGuard no_grad;
    torch::nn::utils::vector_to_parameters(before, net->parameters());
    at::AutoGradMode with_grad(true);
    Optimizer optimizer(ddp.parameters(), world, AdamWOptions(1e-3));
#include "docs/optimizers/its_state_2.inc"
    EXPECT_TRUE(weights(optimizer).equal(expected));
  });
}

TEST(OptimizersPage, GradientsAreClippedAndDropped) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    auto net = seeded_net();
    lockstep::DistributedDataParallel ddp(net, world);
    const auto batch = Samples().of_rank(world.rank());
    (100 * loss_function(ddp(batch.data), batch.target)).backward();
    net->layer->bias.mutable_grad().zero_();
#include "docs/optimizers/between_backward_and_step.inc"
    EXPECT_GT(norm.item<double>(), 1);
    EXPECT_NEAR(net->layer->weight.grad().norm().item<double>(), 1, 1e-5);
    EXPECT_FALSE(net->layer->bias.grad().defined());
  });
}

}  // namespace
