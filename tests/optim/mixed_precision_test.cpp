// GradScaler.

#include <cmath>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/gradient_tools.h>
#include <lockstep/optimizer_state.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/messages.h"
#include "support/python.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using torch::Tensor;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

const auto kInf = std::numeric_limits<double>::infinity();

// --- GradScaler

constexpr int kScaledSteps = 30;

double factor_of(int step) {
  return step % 7 == 3 ? kInf : step % 11 == 8 ? std::nan("") : 1.0 + step;
}

template <class Optimizer>
void expect_scaling_as_in(const std::string& lines) {
  std::istringstream expected(lines);
  auto weight = torch::linspace(-1, 1, 6).requires_grad_();
  Optimizer optimizer(std::vector<Tensor>{weight}, AdamWOptions(0.1));
  GradScaler scaler({.init_scale = 1024, .growth_factor = 3, .backoff_factor = 0.25, .growth_interval = 4});
  for (int step = 0; step < kScaledSteps; ++step) {
    optimizer.zero_grad();
    scaler.scale((weight * weight * factor_of(step)).sum()).backward();
    if (step % 2 == 0) {
      scaler.unscale_(optimizer);
      clip_grad_norm_({weight}, 1.0);
    }
    const double scale = scaler.get_scale();
    scaler.step(optimizer);
    scaler.update();
    double python = 0;
    expected >> python;
    EXPECT_EQ(scale, python) << "step " << step;
    expected >> python;
    EXPECT_EQ(scaler.state_dict().at("_growth_tracker").as_int(), python) << "step " << step;
    for (int i = 0; i < 6; ++i) {
      expected >> python;
      EXPECT_NEAR(weight[i].item<double>(), python, 1e-6) << "step " << step;
    }
    ASSERT_TRUE(expected) << lines;
  }
}

TEST(GradScaling, IsAsInPython) {
  const char* python = std::getenv("LOCKSTEP_TEST_PYTHON_2X");
  if (!python || !*python)
    GTEST_SKIP() << "needs Python's torch 2.x, whose GradScaler has CPUs: set LOCKSTEP_TEST_PYTHON_2X";
  const TemporaryFolder folder;
  const auto out = (folder.path() / "out").string();
  ASSERT_EQ(run_python(python, "optim/amp_oracle.py", {std::to_string(kScaledSteps)}, {.out = out}), 0);
  std::ostringstream lines;
  lines << std::ifstream(out).rdbuf();
  expect_scaling_as_in<FusedAdamW>(lines.str());
  expect_scaling_as_in<torch::optim::AdamW>(lines.str());
}

// Without Python: by the rules of its documentation.
TEST(GradScaling, SkipsStepsWithInfinitiesAndGrowsAfterGoodOnes) {
  auto weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.5);
  GradScaler scaler({.init_scale = 8, .growth_interval = 2});
  auto step = [&](double factor) {
    optimizer.zero_grad();
    scaler.scale((weight * factor).sum()).backward();
    scaler.step(optimizer);
    scaler.update();
    return std::pair(weight[0].item<double>(), scaler.get_scale());
  };
  EXPECT_EQ(step(1), std::pair(0.5, 8.0));
  EXPECT_EQ(step(kInf), std::pair(0.5, 4.0));
  EXPECT_EQ(step(std::nan("")), std::pair(0.5, 2.0));
  EXPECT_EQ(step(1), std::pair(0.0, 2.0));
  EXPECT_EQ(step(1), std::pair(-0.5, 4.0));
}

TEST(GradScaling, ContinuesFromASavedState) {
  auto weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.5);
  auto good_step = [&](GradScaler& scaler) {
    optimizer.zero_grad();
    scaler.scale(weight.sum()).backward();
    scaler.step(optimizer);
    scaler.update();
  };
  GradScaler first({.init_scale = 8, .growth_factor = 4, .growth_interval = 3});
  good_step(first);
  good_step(first);
  for (const bool has_scaled : {false, true}) {
    GradScaler second;
    if (has_scaled) good_step(second);
    second.load_state_dict(first.state_dict());
    EXPECT_EQ(second.state_dict(), first.state_dict());
    good_step(second);
    EXPECT_EQ(second.get_scale(), 32);
  }
  first.update(5.0);
  EXPECT_EQ(first.get_scale(), 5);
  expect_error<UsageError>([&] { GradScaler().load_state_dict(Value::dict()); }, "empty");
}

TEST(GradScaling, ChecksTheOrderOfCalls) {
  auto weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.5);
  GradScaler scaler;
  expect_error<UsageError>([&] { scaler.step(optimizer); }, "before scale()");
  scaler.scale(weight.sum()).backward();
  scaler.unscale_(optimizer);
  expect_error<UsageError>([&] { scaler.unscale_(optimizer); }, "unscale_() was called after unscale_()", "update()");
  scaler.step(optimizer);
  expect_error<UsageError>([&] { scaler.step(optimizer); }, "called twice");
  expect_error<UsageError>([&] { scaler.unscale_(optimizer); }, "after step()");
  scaler.update();
  expect_error<UsageError>([&] { scaler.update(); }, "no gradients were unscaled");

  auto half = torch::ones({2}, at::kHalf).requires_grad_();
  half.mutable_grad() = torch::ones_like(half);
  torch::optim::SGD of_half({half}, 0.5);
  expect_error<UsageError>([&] { scaler.unscale_(of_half); }, "float16", "autocast");
  expect_error<UsageError>([] { GradScaler({.init_scale = 0}); }, "init_scale is 0");
  expect_error<UsageError>([] { GradScaler({.growth_factor = 1}); }, "growth_factor is 1");
  expect_error<UsageError>([] { GradScaler({.backoff_factor = 1}); }, "backoff_factor is 1");
  expect_error<UsageError>([] { GradScaler({.growth_interval = 0}); }, "growth_interval is 0");
}

TEST(GradScaling, CanBeSwitchedOff) {
  auto weight = torch::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({weight}, 0.5);
  GradScaler scaler({.enabled = false});
  const auto loss = weight.sum();
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(optimizer);
  scaler.step(optimizer);
  scaler.update();
  EXPECT_TRUE(weight.equal(torch::full({2}, 0.5)));
  EXPECT_EQ(scaler.get_scale(), 1);
}

// An infinity of one rank is in the average of all; without DistributedDataParallel the group decides.
TEST(GradScaling, RanksSkipTogether) {
  run_threads(2, [&](ProcessGroup world) {
    auto weight = torch::ones({2}).requires_grad_();
    DistributedDataParallel ddp(
        {{"w", weight}}, [&](double by) { return (weight * by).sum(); }, world);
    FusedSGD optimizer(ddp.parameters(), SGDOptions(0.5));
    GradScaler scaler({.init_scale = 4});
    scaler.scale(ddp(world.rank() == 1 ? kInf : 1.0)).backward();
    scaler.step(optimizer);
    scaler.update();
    EXPECT_TRUE(weight.equal(torch::ones({2})));
    EXPECT_EQ(scaler.get_scale(), 2);

    auto own = torch::ones({2}).requires_grad_();
    torch::optim::SGD own_optimizer({own}, 0.5);
    GradScaler together({.init_scale = 4, .group = world});
    together.scale((own * (world.rank() == 1 ? kInf : 1.0)).sum()).backward();
    together.step(own_optimizer);
    together.update();
    EXPECT_TRUE(own.equal(torch::ones({2})));
    EXPECT_EQ(together.get_scale(), 2);
  });
}

TEST(GradScaling, OfAShardedOptimizerSkipsOnAllRanks) {
  run_threads(2, [&](ProcessGroup world) {
    auto weight = torch::ones({5}).requires_grad_();
    ZeroRedundancyOptimizer<FusedAdamW> fused({weight}, world, AdamWOptions(0.1));
    auto other = torch::ones({5}).requires_grad_();
    ZeroRedundancyOptimizer<torch::optim::AdamW> plain({other}, world, AdamWOptions(0.1));
    GradScaler scaler({.init_scale = 4});
    for (const double factor : {1.0, kInf, 2.0}) {
      const auto before = weight.clone(), other_before = other.clone();
      for (torch::optim::Optimizer* optimizer :
           {static_cast<torch::optim::Optimizer*>(&fused), static_cast<torch::optim::Optimizer*>(&plain)})
        optimizer->zero_grad();
      scaler.scale(((weight * weight + other * other) * factor).sum()).backward();
      scaler.step(fused);
      scaler.step(plain);
      scaler.update();
      EXPECT_EQ(weight.equal(before), std::isinf(factor));
      EXPECT_EQ(other.equal(other_before), std::isinf(factor));
    }
    EXPECT_LT((weight - other).abs().max().item<double>(), 1e-6);
    EXPECT_EQ(scaler.get_scale(), 2);
  });
}

TEST(GradScaling, OfAShardedOptimizerIsRefusedInAJoin) {
  run_threads(1, [&](ProcessGroup world) {
    auto weight = torch::ones({2}).requires_grad_();
    DistributedDataParallel ddp(
        {{"w", weight}}, [&](double by) { return (weight * by).sum(); }, world);
    ZeroRedundancyOptimizer<FusedSGD> optimizer({weight}, world, SGDOptions(0.1));
    GradScaler scaler;
    join({&ddp, &optimizer}, [&] {
      scaler.scale(ddp(1.0)).backward();
      expect_error<UsageError>([&] { scaler.step(optimizer); }, "GradScaler cannot be used in a join", "bfloat16");
      optimizer.step();
    });
  });
}

TEST(GradScaling, UnscalesSparseGradients) {
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 2).sparse(true));
  GradScaler scaler({.init_scale = 4});
  torch::optim::SGD optimizer(table->parameters(), 0.5);
  scaler.scale(table(torch::tensor({1, 1})).sum()).backward();
  scaler.unscale_(optimizer);
  auto expected = torch::zeros({4, 2});
  expected[1].fill_(2);
  EXPECT_TRUE(table->weight.grad().to_dense().equal(expected));
}

}  // namespace
}  // namespace lockstep
