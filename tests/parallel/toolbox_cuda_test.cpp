// Mixed precision, schedules, recomputation, and models of any kind, with ranks as processes that share one GPU.

#include <cmath>

#include <gtest/gtest.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <lockstep/autocast.h>
#include <lockstep/captured_step.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/gradient_tools.h>
#include <lockstep/lr_scheduler.h>
#include <lockstep/optimizer_state.h>
#include <lockstep/recompute.h>
#include <lockstep/schedules.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "parallel/gpu.h"
#include "parallel/gradients.h"
#include "parallel/models.h"
#include "parallel/training.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

class CudaToolbox : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  }
  void on_both(const std::function<void(ProcessGroup)>& body) { on_every_rank("nccl", 2, body, kGpu); }
};

Mlp gpu_mlp(at::ScalarType dtype = at::kFloat) {
  auto model = filled_mlp();
  model->to(kGpu, dtype);
  return model;
}

void expect_same_parameters(const torch::nn::Module& actual, const torch::nn::Module& expected, double tolerance) {
  for (size_t i = 0; i < expected.parameters().size(); ++i)
    EXPECT_LE(relative_difference(actual.parameters()[i].cpu(), expected.parameters()[i].cpu()), tolerance) << i;
}

// --- GradScaler and autocast in captured steps

template <class Make>
void expect_scaled_training(const ProcessGroup& world, const char* what, const Make& make) {
  SCOPED_TRACE(what);
  auto eager = gpu_mlp(), captured = gpu_mlp();
  DistributedDataParallel eager_ddp(eager, world), ddp(captured, world);
  auto eager_optimizer = make(eager_ddp.parameters()), optimizer = make(ddp.parameters());
  const GradScalerOptions options{.init_scale = 1024, .growth_interval = 3};
  GradScaler eager_scaler(options), scaler(options);
  auto train = [](auto& wrapper, torch::optim::Optimizer& stepping, GradScaler& scaling, const Tensor& input,
                  const Tensor& target) {
    stepping.zero_grad();
    Tensor loss;
    {
      auto guard = autocast(kGpu, at::kHalf);
      loss = torch::cross_entropy_loss(wrapper(input).to(at::kFloat), target);
    }
    scaling.scale(loss).backward();
    scaling.unscale_(stepping);
    clip_grad_norm_(wrapper.parameters(), 0.5);
    scaling.step(stepping);
    scaling.update();
  };
  CapturedStep step(world,
                    [&](const Tensor& input, const Tensor& target) { train(ddp, *optimizer, scaler, input, target); });
  for (int i = 0; i < 14; ++i) {
    const int64_t rows = i % 3 == 1 ? 2 : 3;  // a graph for each
    auto input = inputs_of(i, world.rank(), {6}, torch::kFloat).narrow(0, 0, rows).clone();
    const auto target = targets_of(i, world.rank()).narrow(0, 0, rows);
    const bool is_bad = i == 2 || i == 8 || i == 10;
    if (is_bad && world.rank() == 1) input[0][0] = INFINITY;  // on one rank only
    const auto before = captured->first->weight.detach().clone();
    step(input, target);
    EXPECT_EQ(captured->first->weight.equal(before), is_bad) << "step " << i;
    train(eager_ddp, *eager_optimizer, eager_scaler, input.to(kGpu), target.to(kGpu));
    EXPECT_EQ(scaler.get_scale(), eager_scaler.get_scale()) << "step " << i;
  }
  EXPECT_EQ(step.graphs(), 2);
  EXPECT_LT(scaler.get_scale(), 1024 * 8);
  expect_same_parameters(*captured, *eager, 1e-5);
  ddp.check_replicas();
}

TEST_F(CudaToolbox, AScalerSkipsStepsInsideACapturedStep) {
  on_both([](ProcessGroup world) {
    expect_scaled_training(world, "AdamW", [](const auto& parameters) {
      return std::make_unique<FusedAdamW>(parameters, AdamWOptions(0.01).weight_decay(0.1));
    });
    expect_scaled_training(world, "SGD", [](const auto& parameters) {
      return std::make_unique<FusedSGD>(parameters, SGDOptions(0.05).momentum(0.9).dampening(0.1));
    });
    expect_scaled_training(world, "sharded", [&](const auto& parameters) {
      return std::make_unique<ZeroRedundancyOptimizer<FusedAdamW>>(parameters, world, AdamWOptions(0.01));
    });
  });
}

TEST_F(CudaToolbox, SkippedStepsAreNotCounted) {
  on_both([](ProcessGroup world) {
    auto model = gpu_mlp();
    DistributedDataParallel ddp(model, world);
    FusedAdamW optimizer(ddp.parameters(), 0.01);
    GradScaler scaler;
    for (int i = 0; i < 5; ++i) {
      optimizer.zero_grad();
      scaler.scale(ddp(input_of(world.rank()).to(kGpu)).sum() * (i == 3 ? INFINITY : 1.0)).backward();
      scaler.step(optimizer);
      scaler.update();
    }
    EXPECT_EQ(state_dict(optimizer)["state"][0]["step"].tensor().item<float>(), 4);
  });
}

TEST_F(CudaToolbox, AScalerDoesNotMakeTheHostWait) {
  on_both([](ProcessGroup world) {
    auto model = gpu_mlp();
    DistributedDataParallel ddp(model, world);
    FusedAdamW optimizer(ddp.parameters(), 0.01);
    GradScaler scaler;
    const auto input = input_of(world.rank()).to(kGpu);
    auto step = [&] {
      optimizer.zero_grad();
      scaler.scale(ddp(input).sum()).backward();
      scaler.step(optimizer);
      scaler.update();
    };
    for (int i = 0; i < 3; ++i) step();
    const NoWaiting guard;
    for (int i = 0; i < 3; ++i) step();
  });
}

TEST_F(CudaToolbox, AStepInsideOfAnAutocastGuardIsNotCaptured) {
  on_both([](ProcessGroup world) {
    auto model = gpu_mlp();
    DistributedDataParallel ddp(model, world);
    CapturedStep step(world, [&](const Tensor& input) { return ddp(input).sum(); });
    const auto guard = autocast(kGpu, at::kBFloat16);
    const auto input = input_of(world.rank());
    for (int i = 0; i < 3; ++i) step(input);
    expect_error<UsageError>([&] { step(input); }, "autocast guard", "inside of the step");
  });
}

// --- master weights

TEST_F(CudaToolbox, MasterWeightsTrainAsOnACpu) {
  on_both([](ProcessGroup world) {
    auto run = [&](auto make) {
      auto on_cpu = torch::linspace(0.5, 2, 40).to(at::kBFloat16).requires_grad_();
      auto on_gpu = on_cpu.detach().to(kGpu).requires_grad_();
      auto captured = on_gpu.detach().clone().requires_grad_();
      auto cpu_optimizer = make(on_cpu), gpu_optimizer = make(on_gpu), captured_optimizer = make(captured);
      auto step = [](auto& parameter, auto& optimizer) {
        parameter.mutable_grad() = parameter.detach() * 0.001;
        optimizer->step();
      };
      CapturedStep replayed(world, [&] { step(captured, captured_optimizer); });
      for (int i = 0; i < 20; ++i) {
        step(on_cpu, cpu_optimizer);
        step(on_gpu, gpu_optimizer);
        replayed();
      }
      EXPECT_TRUE(replayed.is_captured());
      auto master_of = [](auto& optimizer) {
        return state_dict(*optimizer)["state"][0]["master_param"].tensor().cpu();
      };
      EXPECT_LT(relative_difference(master_of(gpu_optimizer), master_of(cpu_optimizer)), 1e-6);
      EXPECT_TRUE(master_of(captured_optimizer).equal(master_of(gpu_optimizer)));
      EXPECT_TRUE(on_gpu.cpu().equal(master_of(gpu_optimizer).to(at::kBFloat16)));
      EXPECT_TRUE(captured.equal(on_gpu));
    };
    run([](const Tensor& parameter) {
      return std::make_unique<WithMasterWeights<FusedAdamW>>(std::vector<Tensor>{parameter}, AdamWOptions(1e-4));
    });
    run([](const Tensor& parameter) {
      return std::make_unique<WithMasterWeights<FusedSGD>>(std::vector<Tensor>{parameter},
                                                           SGDOptions(0.1).momentum(0.9));
    });
  });
}

// --- schedules

TEST_F(CudaToolbox, SchedulesReachACapturedStep) {
  on_both([](ProcessGroup world) {
    auto eager = gpu_mlp(), captured = gpu_mlp();
    DistributedDataParallel eager_ddp(eager, world), ddp(captured, world);
    FusedAdamW eager_optimizer(eager_ddp.parameters(), 0.01), optimizer(ddp.parameters(), 0.01);
    const auto schedule = schedules::sequential(
        {schedules::linear({.start_factor = 0.1, .total_iters = 5}), schedules::cosine_annealing({.t_max = 8})}, {5});
    LRScheduler eager_scheduler(eager_optimizer, schedule), scheduler(optimizer, schedule);
    auto train = [](auto& wrapper, auto& stepping, const Tensor& input, const Tensor& target) {
      stepping.zero_grad();
      torch::cross_entropy_loss(wrapper(input), target).backward();
      stepping.step();
    };
    CapturedStep step(world, [&](const Tensor& input, const Tensor& target) { train(ddp, optimizer, input, target); });
    for (int i = 0; i < 14; ++i) {
      const auto input = inputs_of(i, world.rank(), {6}, torch::kFloat).to(kGpu);
      const auto target = targets_of(i, world.rank()).to(kGpu);
      step(input, target);
      scheduler.step();
      train(eager_ddp, eager_optimizer, input, target);
      eager_scheduler.step();
    }
    EXPECT_TRUE(step.is_captured());
    expect_same_parameters(*captured, *eager, 1e-6);
  });
}

TEST_F(CudaToolbox, AMomentumThatChangesAfterTheCaptureIsRefused) {
  on_both([](ProcessGroup world) {
    auto model = gpu_mlp();
    DistributedDataParallel ddp(model, world);
    FusedSGD optimizer(ddp.parameters(), SGDOptions(0.01).momentum(0.9));
    CapturedStep step(world, [&](const Tensor& input) {
      optimizer.zero_grad();
      ddp(input).sum().backward();
      optimizer.step();
    });
    for (int i = 0; i < 5; ++i) step(input_of(world.rank()));
    LRScheduler scheduler(optimizer, schedules::one_cycle({.max_lr = 0.1, .total_steps = 10}));
    expect_error<UsageError>([&] { step(input_of(world.rank())); }, "other than the learning rate", "cycle_momentum");
  });
}

// --- recompute

TEST_F(CudaToolbox, SegmentsAreRecomputedInACapturedStep) {
  on_both([](ProcessGroup world) {
    struct RecomputedMlp : MlpImpl {
      Tensor forward(Tensor x) {
        return third(recompute(
            {.preserve_random_numbers = false}, [this](Tensor y) { return torch::tanh(second(torch::tanh(first(y)))); },
            x));
      }
    };
    auto eager = gpu_mlp();
    auto captured = std::make_shared<RecomputedMlp>();
    fill_parameters(*captured, 1);
    captured->to(kGpu);
    DistributedDataParallel eager_ddp(eager, world);
    DistributedDataParallel ddp(captured, world);
    FusedAdamW eager_optimizer(eager_ddp.parameters(), 0.01), optimizer(ddp.parameters(), 0.01);
    auto train = [](auto& wrapper, auto& stepping, const Tensor& input, const Tensor& target) {
      stepping.zero_grad();
      torch::cross_entropy_loss(wrapper(input), target).backward();
      stepping.step();
    };
    CapturedStep step(world, [&](const Tensor& input, const Tensor& target) { train(ddp, optimizer, input, target); });
    for (int i = 0; i < 8; ++i) {
      const auto input = inputs_of(i, world.rank(), {6}, torch::kFloat).to(kGpu);
      const auto target = targets_of(i, world.rank()).to(kGpu);
      step(input, target);
      train(eager_ddp, eager_optimizer, input, target);
    }
    EXPECT_TRUE(step.is_captured());
    expect_same_parameters(*captured, *eager, 1e-6);
  });
}

TEST_F(CudaToolbox, RecomputedRandomNumbersAreTheSameButNotInACapture) {
  on_both([](ProcessGroup world) {
    auto weight = torch::ones({1000}, kGpu).requires_grad_();
    auto drop = [&](const Tensor& x) { return torch::dropout(x * 3, 0.5, true); };
    auto run = [&](bool recomputes) {
      torch::manual_seed(7);
      weight.mutable_grad().reset();
      auto dropped = recomputes ? recompute(drop, weight) : drop(weight);
      (dropped * dropped).sum().backward();
      return std::pair(weight.grad().clone(), torch::rand({3}, kGpu));
    };
    const auto [expected, expected_after] = run(false);
    const auto [gradient, after] = run(true);
    EXPECT_TRUE(gradient.equal(expected));
    EXPECT_TRUE(after.equal(expected_after));

    CapturedStep step(world, [&] {
      weight.mutable_grad().reset();
      recompute(drop, weight).sum().backward();
    });
    for (int i = 0; i < 3; ++i) step();
    expect_error<UsageError>([&] { step(); }, "random numbers cannot be repeated", "preserve_random_numbers");
  });
}

// --- models of any kind

TEST_F(CudaToolbox, FrozenParametersTakeNoPart) {
  const auto means = mean_gradients(2);
  on_both([&](ProcessGroup world) {
    auto model = gpu_mlp();
    DistributedDataParallel ddp(model, world);
    const auto input = input_of(world.rank()).to(kGpu);
    for (int step = 0; step < 20; ++step) {
      for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
      const bool is_frozen = step % 2 == 1;
      for (auto& parameter : model->second->parameters()) parameter.requires_grad_(!is_frozen);
      ddp(input).square().sum().backward();
      EXPECT_EQ(model->second->weight.grad().defined(), !is_frozen);
      for (const size_t i : {0, 1, 4, 5})
        EXPECT_LE(relative_difference(model->parameters()[i].grad().cpu(), means[i]), 1e-5) << i;
    }
    for (auto& parameter : model->second->parameters()) parameter.requires_grad_(true);
    CapturedStep step(world, [&](const Tensor& x) {
      for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
      ddp(x).square().sum().backward();
    });
    for (int i = 0; i < 5; ++i) step(input);
    model->second->bias.requires_grad_(false);
    expect_error<UsageError>([&] { step(input); }, "'second.bias' was trained when the step was captured");
  });
}

// CapturedStep runs on a stream of its own, on which the wrapper hooks its parameters again.
TEST_F(CudaToolbox, AModelThatIsFrozenInPartIsCapturedAndDoesNotMakeTheHostWait) {
  const auto means = mean_gradients(2);
  on_both([&](ProcessGroup world) {
    auto model = gpu_mlp();
    DistributedDataParallel ddp(model, world);
    for (auto& parameter : model->second->parameters()) parameter.requires_grad_(false);
    const auto input = input_of(world.rank()).to(kGpu);
    auto backward = [&](const Tensor& x) {
      for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
      ddp(x).square().sum().backward();
    };
    {
      CapturedStep step(world, backward);
      for (int i = 0; i < 6; ++i) step(input);
      EXPECT_TRUE(step.is_captured());
    }
    for (auto& parameter : model->second->parameters()) parameter.requires_grad_(true);
    for (int i = 0; i < 2; ++i) backward(input);
    for (size_t i = 0; i < means.size(); ++i)
      EXPECT_LE(relative_difference(model->parameters()[i].grad().cpu(), means[i]), 1e-5) << i;
    for (auto& parameter : model->second->parameters()) parameter.requires_grad_(false);
    backward(input);
    const NoWaiting guard;
    for (int i = 0; i < 20; ++i) backward(input);
  });
}

TEST_F(CudaToolbox, SparseGradientsAreGathered) {
  on_both([](ProcessGroup world) {
    for (const bool densify : {false, true}) {
      torch::nn::Embedding table(torch::nn::EmbeddingOptions(20, 3).sparse(true));
      table->to(kGpu);
      DistributedDataParallel ddp(table, world, {.densify_sparse_gradients = densify});
      for (int step = 0; step < 3; ++step) {
        table->weight.mutable_grad().reset();
        ddp(torch::tensor({world.rank(), 5}).to(kGpu)).sum().backward();
        auto expected = torch::zeros({20, 3});
        expected.narrow(0, 0, 2).fill_(0.5);
        expected[5].fill_(1);
        const auto gradient = table->weight.grad();
        EXPECT_EQ(gradient.is_sparse(), !densify);
        EXPECT_TRUE((densify ? gradient : gradient.to_dense()).cpu().equal(expected));
      }
    }
  });
}

TEST_F(CudaToolbox, ComplexAndConvertedGradientsAreAveraged) {
  on_both([](ProcessGroup world) {
    auto weight = torch::full({3}, c10::complex<float>(1, 2), torch::TensorOptions(kGpu).dtype(at::kComplexFloat));
    weight.requires_grad_();
    DistributedDataParallel complex(
        {{"w", weight}}, [&](double by) { return torch::view_as_real(weight * by).sum(); }, world);
    complex(world.rank() + 1.0).backward();
    EXPECT_TRUE(torch::view_as_real(weight.grad()).cpu().equal(torch::full({3, 2}, 1.5)));

    auto half = torch::ones({8}, torch::TensorOptions(kGpu).dtype(at::kBFloat16)).requires_grad_();
    DistributedDataParallel converted({{"w", half}}, [&](double by) { return (half * by).sum(); }, world,
                                      {.reduce_dtype = at::kFloat});
    for (int step = 0; step < 3; ++step) {
      half.mutable_grad().reset();
      converted(world.rank() == 0 ? 256.0 : 1.0).backward();
      EXPECT_TRUE(half.grad().cpu().equal(torch::full({8}, 128.5, at::kBFloat16)));
    }
  });
}

TEST_F(CudaToolbox, ScriptsAreTrained) {
  on_both([](ProcessGroup world) {
    torch::jit::Module script("Net");
    script.register_parameter("weight", torch::ones({6, 4}).requires_grad_(), false);
    script.define("def forward(self, x):\n  return torch.tanh(torch.matmul(x, self.weight))\n");
    script.to(kGpu);
    DistributedDataParallel ddp(script, world);
    for (int step = 0; step < 4; ++step) {
      ddp.parameters()[0].mutable_grad().reset();
      ddp(input_of(world.rank()).to(kGpu)).toTensor().sum().backward();
    }
    auto alone = torch::ones({6, 4}).requires_grad_();
    for (int rank : {0, 1}) (torch::tanh(input_of(rank).matmul(alone)).sum() / 2).backward();
    EXPECT_LE(relative_difference(ddp.parameters()[0].grad().cpu(), alone.grad()), 1e-5);
  });
}

}  // namespace
}  // namespace lockstep
