// Parameters that are frozen and trained again between steps.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using torch::Tensor;

void freeze(const torch::nn::Module& module, bool frozen = true) {
  for (auto& parameter : module.parameters()) parameter.set_requires_grad(!frozen);
}

void backward(DistributedDataParallel<MlpImpl>& ddp, int rank) {
  ddp(input_of(rank)).square().sum().backward();
}

/// Expects the mean gradients, except in the second layer, whose gradients are `seconds`.
void expect_all_but_second(const Mlp& model, const std::vector<Tensor>& means, const std::vector<Tensor>& seconds) {
  auto expected = means;
  for (size_t i = 0; i < seconds.size(); ++i) expected[2 + i] = seconds[i];
  expect_gradients(*model, expected);
}

class Frozen : public testing::TestWithParam<DistributedDataParallelOptions> {};

TEST_P(Frozen, ParametersKeepTheirGradientAndTheOthersAreAveraged) {
  const auto means = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, GetParam());
    for (int round = 0; round < 3; ++round) {
      ddp.module()->zero_grad();
      backward(ddp, world.rank());
      expect_gradients(*model, means);
      const std::vector<Tensor> own{torch::full({12, 16}, 7.0 + round), torch::full({12}, 8.0 + round)};
      model->second->weight.mutable_grad().copy_(own[0]);
      model->second->bias.mutable_grad().copy_(own[1]);
      for (const auto& layer : {model->first, model->third})
        for (const auto& parameter : layer->parameters()) parameter.mutable_grad().zero_();
      freeze(*model->second);
      backward(ddp, world.rank());
      expect_all_but_second(model, means, own);
      freeze(*model->second, false);
    }
  });
}

TEST_P(Frozen, ParametersMayBeTrainedAgainBeforeBackward) {
  const auto means = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, GetParam());
    for (int round = 0; round < 2; ++round) {
      freeze(*model->second);
      const auto output = ddp(input_of(world.rank()));
      freeze(*model->second, false);
      output.square().sum().backward();
      EXPECT_FALSE(model->second->weight.grad().defined());
      EXPECT_LE(relative_difference(model->first->weight.grad(), means[0]), 1e-6);
      for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    }
    backward(ddp, world.rank());
    expect_gradients(*model, means);
  });
}

TEST_P(Frozen, ParametersMayBeFrozenBetweenForwardAndBackward) {
  const auto means = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, GetParam());
    const auto output = ddp(input_of(world.rank()));
    freeze(*model->second);
    output.square().sum().backward();
    EXPECT_FALSE(model->second->weight.grad().defined());
    EXPECT_LE(relative_difference(model->first->weight.grad(), means[0]), 1e-6);
    EXPECT_LE(relative_difference(model->third->weight.grad(), means[4]), 1e-6);
  });
}

// One of two forwards was with all parameters: backward reaches them through it.
TEST_P(Frozen, OneOfSeveralForwardsIsAveragedWithTheOthers) {
  const auto means = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, GetParam());
    const auto one = ddp(input_of(world.rank())).square().sum();
    freeze(*model->second);
    const auto two = ddp(input_of(world.rank())).square().sum();
    freeze(*model->second, false);
    (one + two).backward();
    expect_all_but_second(model, {2 * means[0], 2 * means[1], {}, {}, 2 * means[4], 2 * means[5]},
                          {means[2], means[3]});
  });
}

TEST_P(Frozen, ParametersWithGradientsOfNoSyncAreStillAveraged) {
  const auto means = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, GetParam());
    {
      auto guard = ddp.no_sync();
      backward(ddp, world.rank());
    }
    freeze(*model->second);
    backward(ddp, world.rank());
    expect_all_but_second(model, {2 * means[0], 2 * means[1], {}, {}, 2 * means[4], 2 * means[5]},
                          {means[2], means[3]});
  });
}

TEST_P(Frozen, ModelsDoNotCommunicate) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, GetParam());
    backward(ddp, world.rank());
    const auto steps = ddp.logging_data().steps;
    std::vector<Tensor> gradients;
    for (const auto& parameter : model->parameters()) gradients.push_back(parameter.grad().clone());
    freeze(*model);
    if (world.rank() == 0) {  // on one rank only: nobody waits for it
      auto input = input_of(0).requires_grad_();
      ddp(input).square().sum().backward();
      EXPECT_GT(input.grad().abs().sum().item<float>(), 0);
    }
    EXPECT_EQ(ddp.logging_data().steps, steps);
    expect_gradients(*model, gradients);
    freeze(*model, false);
    for (auto& parameter : model->parameters()) parameter.mutable_grad().zero_();
    backward(ddp, world.rank());
    expect_gradients(*model, gradients);
  });
}

TEST_P(Frozen, OnOneRankOnlyIsReportedOnEveryRank) {
  run_threads_into_an_error(3, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, GetParam());
    backward(ddp, world.rank());
    if (world.rank() == 1) model->second->bias.set_requires_grad(false);
    expect_error<MismatchError>([&] { backward(ddp, world.rank()); }, "rank " + std::to_string(world.rank()),
                                "'second.bias' was frozen on some ranks, but trained on others");
  });
}

const std::vector<DistributedDataParallelOptions> kFreezingOptions{
    {}, {.gradient_as_bucket_view = false}, {.find_unused_parameters = true}, {.buckets = {100, 200}}};
const std::vector<std::string> kFreezingNames{"default", "own_memory", "unused", "small_buckets"};

INSTANTIATE_TEST_SUITE_P(With, Frozen, testing::ValuesIn(kFreezingOptions),
                         [](const auto& info) { return kFreezingNames[info.index]; });

TEST(FrozenParameters, AreRefusedInAStaticGraph) {
  run_threads(1, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.static_graph = true});
    model->first->bias.set_requires_grad(false);
    expect_error<UsageError>([&] { ddp(input_of(0)); }, "'first.bias' is frozen", "without static_graph");
  });
}

TEST(FrozenParameters, DoNotFailChecksWithTheirOldGradients) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.check_finite = true});
    backward(ddp, world.rank());
    model->second->bias.mutable_grad().fill_(NAN);
    freeze(*model->second);
    backward(ddp, world.rank());
    EXPECT_TRUE(model->second->bias.grad().isnan().all().item<bool>());
  });
}

// A rank without inputs takes part in the reductions of the others, and only in those.
TEST(FrozenParameters, MayBeFrozenInAJoin) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    ddp.join([&] {
      for (int step = 0; step < 2 + 2 * world.rank(); ++step) {
        freeze(*model, step % 2 == 1);
        auto input = input_of(world.rank()).requires_grad_();
        ddp(input).square().sum().backward();
      }
    });
    freeze(*model, false);
  });
}

TEST(FrozenParameters, ThatWereFrozenWhenTheModelWasWrappedMustStaySo) {
  run_threads(1, [&](ProcessGroup world) {
    auto model = filled_mlp();
    model->first->weight.set_requires_grad(false);
    DistributedDataParallel ddp(model, world);
    model->first->weight.set_requires_grad(true);
    expect_error<UsageError>([&] { ddp(input_of(0)); }, "'first.weight' was frozen", "is trained now",
                             "freeze it after wrapping");
  });
}

}  // namespace
}  // namespace lockstep
