// GradScaler, and parameters in half precision with master weights.

#include <cmath>
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
#include "support/rank_process.h"
#include "support/ranks.h"

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
  RankProcess process(
      {python, std::string(LOCKSTEP_TEST_SOURCE_DIR) + "/optim/amp_oracle.py", std::to_string(kScaledSteps)}, {});
  ASSERT_EQ(process.wait(std::chrono::minutes(1)), 0) << process.output();
  expect_scaling_as_in<FusedAdamW>(process.output());
  expect_scaling_as_in<torch::optim::AdamW>(process.output());
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

// --- master weights

/// What an optimizer does to a bfloat16 parameter of which it keeps a float32 copy, by LibTorch's own optimizer.
template <class Reference, class Options>
Tensor by_reference(const Options& options, int steps) {
  auto master = torch::linspace(0.5, 2, 7).to(at::kBFloat16).to(at::kFloat).requires_grad_();
  Reference optimizer(std::vector<Tensor>{master}, options);
  for (int step = 0; step < steps; ++step) {
    const auto rounded = master.detach().to(at::kBFloat16);
    master.mutable_grad() = (rounded * 0.001).to(at::kFloat);
    optimizer.step();
  }
  return master.detach();
}

template <class Optimizer>
void step_with_masters(Optimizer& optimizer, Tensor parameter, int steps) {
  for (int step = 0; step < steps; ++step) {
    parameter.mutable_grad() = (parameter.detach() * 0.001);
    optimizer.step();
  }
}

Tensor new_half() {
  return torch::linspace(0.5, 2, 7).to(at::kBFloat16).requires_grad_();
}

template <class Fused, class Reference, class Options>
void expect_masters(const Options& options) {
  constexpr int kSteps = 40;
  auto half = new_half();
  Fused optimizer(std::vector<Tensor>{half}, options);
  optimizer.keep_master_weights();
  step_with_masters(optimizer, half, kSteps);
  const Tensor expected = by_reference<Reference>(options, kSteps);
  const OptimizerState state = state_dict(optimizer);
  const Tensor master = state.parameters.at(0).at("master_param").toTensor();
  EXPECT_EQ(master.scalar_type(), at::kFloat);
  EXPECT_LT((master - expected).abs().max().item<double>(), 1e-6);
  EXPECT_TRUE(half.equal(master.to(at::kBFloat16)));
  EXPECT_GT((master - new_half().to(at::kFloat)).abs().max().item<double>(), 1e-3) << "nothing moved";

  auto rounded = new_half();
  Fused without(std::vector<Tensor>{rounded}, options);
  expect_error<UsageError>(
      [&] {
        step_with_masters(without, rounded, 1);
        if (without.state().empty()) throw UsageError("after the first step");
        without.keep_master_weights();
      },
      "after the first step");
}

TEST(MasterWeights, AreUpdatedInFloat32) {
  expect_masters<FusedAdamW, torch::optim::AdamW>(AdamWOptions(1e-4));
  expect_masters<FusedAdam, torch::optim::Adam>(AdamOptions(1e-4).amsgrad(true));
  expect_masters<FusedSGD, torch::optim::SGD>(SGDOptions(0.1).momentum(0.9));
  expect_masters<FusedSGD, torch::optim::SGD>(SGDOptions(1.0));
}

// The exact rule, by hand: the copy takes every small update, of which bfloat16 would lose all.
TEST(MasterWeights, KeepUpdatesThatAreSmallerThanTheRounding) {
  auto half = torch::ones({1}, at::kBFloat16).requires_grad_();
  WithMasterWeights<FusedSGD> optimizer(std::vector<Tensor>{half}, SGDOptions(1.0));
  for (int step = 0; step < 16; ++step) {
    half.mutable_grad() = torch::full({1}, 1.0 / 1024, at::kBFloat16);
    optimizer.step();
  }
  EXPECT_EQ(half.item<float>(), 1 - 16.0f / 1024);
  auto lost = torch::ones({1}, at::kBFloat16).requires_grad_();
  FusedSGD without(std::vector<Tensor>{lost}, SGDOptions(1.0));
  for (int step = 0; step < 16; ++step) {
    lost.mutable_grad() = torch::full({1}, 1.0 / 1024, at::kBFloat16);
    without.step();
  }
  EXPECT_EQ(lost.item<float>(), 1);
}

TEST(MasterWeights, TakeOverWhatOthersWrite) {
  auto half = torch::ones({3}, at::kBFloat16).requires_grad_();
  WithMasterWeights<FusedSGD> optimizer(std::vector<Tensor>{half}, SGDOptions(1.0));
  auto step = [&] {
    half.mutable_grad() = torch::full({3}, 1.0 / 1024, at::kBFloat16);
    optimizer.step();
  };
  step();
  {
    const torch::NoGradGuard no_grad;
    half[0].fill_(4);        // loaded, for example
    half[1].copy_(half[1]);  // written, but with the same value: the copy keeps its digits
  }
  step();
  const auto master = state_dict(optimizer).parameters.at(0).at("master_param").toTensor();
  EXPECT_EQ(master[0].item<float>(), 4 - 1.0f / 1024);
  EXPECT_EQ(master[1].item<float>(), 1 - 2.0f / 1024);
  EXPECT_EQ(master[2].item<float>(), 1 - 2.0f / 1024);
}

TEST(MasterWeights, TakeOverReplacedMemoryAndWhatIsWrittenIntoShards) {
  auto half = torch::ones({3}, at::kBFloat16).requires_grad_();
  WithMasterWeights<FusedSGD> optimizer(std::vector<Tensor>{half}, SGDOptions(1.0));
  auto step = [](auto& stepping, Tensor parameter) {
    parameter.mutable_grad() = torch::full({3}, 1.0 / 1024, at::kBFloat16);
    stepping.step();
  };
  step(optimizer, half);
  half.set_data(torch::full({3}, 4.0, at::kBFloat16));  // as torch::load does
  step(optimizer, half);
  EXPECT_EQ(state_dict(optimizer).parameters.at(0).at("master_param").toTensor()[0].item<float>(), 4 - 1.0f / 1024);

  run_threads(2, [&](ProcessGroup world) {
    auto sharded = torch::ones({3}, at::kBFloat16).requires_grad_();
    ZeroRedundancyOptimizer<WithMasterWeights<FusedSGD>> zero(std::vector<Tensor>{sharded}, world, SGDOptions(1.0));
    for (const double value : {4.0, 8.0}) {
      step(zero, sharded);
      {
        const torch::NoGradGuard no_grad;
        value == 4 ? sharded.fill_(value) : sharded.copy_(torch::full({3}, value));
      }
      step(zero, sharded);
      const auto state = zero.consolidated_state_dict(0);
      if (world.rank() == 0) {
        EXPECT_TRUE(state.parameters.at(0).at("master_param").toTensor().equal(torch::full({3}, value - 1.0 / 1024)));
      }
    }
  });
}

TEST(MasterWeights, AreSavedAndRestored) {
  auto train = [](auto& optimizer, Tensor half, int steps) { step_with_masters(optimizer, half, steps); };
  auto check = [&](auto make) {
    auto straight = new_half(), first = new_half();
    auto uninterrupted = make(straight), before = make(first);
    train(*uninterrupted, straight, 20);
    train(*before, first, 12);

    auto resumed = first.detach().clone().requires_grad_();
    auto after = make(resumed);
    load_state_dict(*after, to_optimizer_state(state_value(*before)));
    train(*after, resumed, 8);
    EXPECT_TRUE(resumed.equal(straight));

    std::stringstream bytes;
    torch::serialize::OutputArchive out;
    before->save(out);
    out.save_to(bytes);
    auto archived = first.detach().clone().requires_grad_();
    auto from_archive = make(archived);
    torch::serialize::InputArchive in;
    in.load_from(bytes);
    from_archive->load(in);
    train(*from_archive, archived, 8);
    EXPECT_TRUE(archived.equal(straight));
    EXPECT_TRUE(state_dict(*from_archive)
                    .parameters.at(0)
                    .at("master_param")
                    .toTensor()
                    .equal(state_dict(*uninterrupted).parameters.at(0).at("master_param").toTensor()));
  };
  check([](const Tensor& half) {
    return std::make_unique<WithMasterWeights<FusedAdamW>>(std::vector<Tensor>{half}, AdamWOptions(1e-4));
  });
  check([](const Tensor& half) {
    return std::make_unique<WithMasterWeights<FusedAdam>>(std::vector<Tensor>{half}, AdamOptions(1e-4));
  });
  check([](const Tensor& half) {
    return std::make_unique<WithMasterWeights<FusedSGD>>(std::vector<Tensor>{half}, SGDOptions(0.1).momentum(0.9));
  });
  check([](const Tensor& half) {
    return std::make_unique<WithMasterWeights<FusedSGD>>(std::vector<Tensor>{half}, SGDOptions(1.0));
  });
}

TEST(MasterWeights, AreShardedWithTheState) {
  auto alone = new_half();
  WithMasterWeights<FusedAdamW> reference(std::vector<Tensor>{alone}, AdamWOptions(1e-4));
  step_with_masters(reference, alone, 20);
  const auto expected = state_dict(reference).parameters.at(0).at("master_param").toTensor();
  OptimizerState saved;
  run_threads(2, [&](ProcessGroup world) {
    using Sharded = ZeroRedundancyOptimizer<WithMasterWeights<FusedAdamW>>;
    auto half = new_half();
    Sharded before(std::vector<Tensor>{half}, world, AdamWOptions(1e-4));
    step_with_masters(before, half, 12);
    auto state = before.consolidated_state_dict(0);
    if (world.rank() == 0) saved = std::move(state);
    world.barrier();

    auto resumed = half.detach().clone().requires_grad_();
    Sharded after(std::vector<Tensor>{resumed}, world, AdamWOptions(1e-4));
    after.load_state_dict(saved);
    step_with_masters(after, resumed, 8);
    EXPECT_TRUE(resumed.equal(alone));
    const auto whole = after.consolidated_state_dict(0);
    if (world.rank() == 0) {
      EXPECT_TRUE(whole.parameters.at(0).at("master_param").toTensor().equal(expected));
    }
  });
}

}  // namespace
}  // namespace lockstep
