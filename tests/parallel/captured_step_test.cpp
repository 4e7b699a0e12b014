#include <lockstep/captured_step.h>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "parallel/optimizer_watch.h"
#include "support/messages.h"

namespace lockstep {
namespace {

TEST(CapturedStep, IsJustTheStepOnACpu) {
  run_threads(2, [](ProcessGroup world) {
    Mlp plain, stepped;
    for (Mlp model : {plain, stepped}) fill_parameters(*model, 1);
    DistributedDataParallel plain_ddp(plain, world), ddp(stepped, world);
    FusedAdamW plain_optimizer(plain->parameters(), 0.01), optimizer(stepped->parameters(), 0.01);
    auto train = [](auto& ddp, auto& optimizer, const torch::Tensor& input) {
      optimizer.zero_grad();
      auto loss = ddp(input).square().mean();
      loss.backward();
      optimizer.step();
      return loss;
    };
    CapturedStep step(world, [&](torch::Tensor input) { return train(ddp, optimizer, input); });
    for (int i = 0; i < 6; ++i) {
      const auto input = input_of(10 * i + world.rank());
      const auto loss = step(input);
      EXPECT_FALSE(loss.requires_grad());
      EXPECT_TRUE(torch::equal(loss, train(plain_ddp, plain_optimizer, input)));
    }
    EXPECT_FALSE(step.is_captured());
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      EXPECT_TRUE(torch::equal(plain->parameters()[i], stepped->parameters()[i]));
  });
}

TEST(CapturedStep, ReturnsWhatHoldsTensorsOrNothing) {
  run_threads(1, [](ProcessGroup world) {
    int calls = 0;
    CapturedStep nothing(world, [&] { ++calls; });
    nothing();
    EXPECT_EQ(calls, 1);
    CapturedStep both(world, [](const torch::Tensor& a, const torch::Tensor& b) {
      return std::pair((a + b).requires_grad_(), std::vector{a * b});
    });
    const auto [sum, products] = both(torch::full({2}, 3.0), torch::full({2}, 4.0));
    EXPECT_TRUE(torch::equal(sum, torch::full({2}, 7.0)));
    EXPECT_TRUE(torch::equal(products[0], torch::full({2}, 12.0)));
    EXPECT_FALSE(sum.requires_grad());
    expect_error<UsageError>([&] { CapturedStep(world, [] {}, {.warm_up = 0}); }, "warm_up is 0", "1 or more");
    expect_error<UsageError>([&] { CapturedStep(world, [] {}, {.max_graphs = 0}); }, "max_graphs is 0", "1 or more");
  });
}

// Captured steps refuse what the watch finds.
TEST(OptimizerWatch, NamesTheOptimizersOfLibTorch) {
  const auto found = [](auto optimizer) {
    const detail::OptimizerWatch watch;
    optimizer.step();
    return watch.found();
  };
  const auto parameters = [] {
    auto weight = torch::ones({3}, torch::requires_grad());
    weight.mutable_grad() = torch::ones({3});
    return std::vector{weight};
  };
  EXPECT_EQ(found(torch::optim::Adam(parameters(), 0.1)), "torch::optim::Adam");
  EXPECT_EQ(found(torch::optim::AdamW(parameters(), 0.1)), "torch::optim::AdamW");
  EXPECT_EQ(found(torch::optim::SGD(parameters(), 0.1)), "torch::optim::SGD");
  EXPECT_EQ(found(torch::optim::RMSprop(parameters(), 0.1)), "torch::optim::RMSprop");
  EXPECT_EQ(found(torch::optim::Adagrad(parameters(), 0.1)), "torch::optim::Adagrad");
  EXPECT_EQ(found(FusedAdamW(parameters(), 0.1)), "");
  EXPECT_EQ(found(FusedAdam(parameters(), 0.1)), "");
  EXPECT_EQ(found(FusedSGD(parameters(), 0.1)), "");
}

TEST(OptimizerWatch, IgnoresEarlierSteps) {
  auto weight = torch::ones({3}, torch::requires_grad());
  torch::optim::SGD optimizer({weight}, 0.1);
  weight.square().sum().backward();
  optimizer.step();
  const detail::OptimizerWatch watch;
  weight.square().sum().backward();
  EXPECT_EQ(watch.found(), "");
  {
    const detail::OptimizerWatch inner;
    optimizer.step();
    EXPECT_EQ(inner.found(), "torch::optim::SGD");
  }
  optimizer.step();
  EXPECT_EQ(watch.found(), "torch::optim::SGD");
}

}  // namespace
}  // namespace lockstep
