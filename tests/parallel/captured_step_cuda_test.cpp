// CapturedStep with ranks as processes that share one GPU.

#include <chrono>
#include <cmath>
#include <sstream>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/captured_step.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/gradient_tools.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "parallel/captured_training.h"
#include "parallel/gpu.h"
#include "parallel/models.h"
#include "parallel/training.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

/// Trains two models alike, one of them captured, and compares: batches of other sizes and other learning rates come in
/// between. `make` makes an optimizer of a model's parameters.
template <class Make>
void expect_the_same_training(const ProcessGroup& world, const char* what, const Make& make) {
  Mlp eager, captured;
  for (Mlp model : {eager, captured}) {
    fill_parameters(*model, 1);
    model->to(kGpu);
  }
  DistributedDataParallel eager_ddp(eager, world), ddp(captured, world);
  auto eager_optimizer = make(eager_ddp.parameters()), optimizer = make(ddp.parameters());
  CapturedStep step(world, [&](const torch::Tensor& input, const torch::Tensor& target) {
    return train(ddp, *optimizer, input, target);
  });
  std::vector<torch::Tensor> losses, expected;
  for (int i = 0; i < 12; ++i) {
    auto input = inputs_of(i, world.rank(), {6}, torch::kFloat);  // on the CPU: the step moves them
    auto target = targets_of(i, world.rank());
    if (i == 7) {
      input = input.narrow(0, 0, 3);
      target = target.narrow(0, 0, 3);
    }
    if (i == 6 || i == 9)
      for (auto* one : {eager_optimizer.get(), optimizer.get()})
        one->param_groups()[0].options().set_lr(one->param_groups()[0].options().get_lr() / 3);
    losses.push_back(step(input, target));
    expected.push_back(train(eager_ddp, *eager_optimizer, input.to(kGpu), target.to(kGpu)).detach());
    EXPECT_EQ(step.is_captured(), i >= 3) << what;
  }
  expect_equal(captured, eager, what);
  for (size_t i = 0; i < losses.size(); ++i)  // each call's own, also when later ones have run
    EXPECT_NEAR(losses[i].item<double>(), expected[i].item<double>(), 1e-5) << what << ", step " << i;
  ddp.check_replicas();
}

TEST_F(CudaCapturedStep, TrainsAsUncaptured) {
  on_both([](ProcessGroup world) {
    expect_the_same_training(world, "AdamW", [](const auto& parameters) {
      return std::make_unique<FusedAdamW>(parameters, AdamWOptions(0.01).weight_decay(0.1));
    });
    expect_the_same_training(world, "Adam", [](const auto& parameters) {
      return std::make_unique<FusedAdam>(parameters, torch::optim::AdamOptions(0.01).amsgrad(true));
    });
    expect_the_same_training(world, "SGD", [](const auto& parameters) {
      return std::make_unique<FusedSGD>(parameters, SGDOptions(0.05).momentum(0.9).nesterov(true));
    });
    expect_the_same_training(world, "plain SGD", [](const auto& parameters) {
      return std::make_unique<FusedSGD>(parameters, SGDOptions(0.05));
    });
    expect_the_same_training(world, "sharded by parameters", [&](const auto& parameters) {
      return std::make_unique<ZeroRedundancyOptimizer<FusedAdamW>>(
          parameters, world, AdamWOptions(0.01), ZeroRedundancyOptions{.shard_by = ShardBy::kParameters});
    });
    expect_the_same_training(world, "sharded", [&](const auto& parameters) {
      return std::make_unique<ZeroRedundancyOptimizer<FusedAdamW>>(parameters, world, AdamWOptions(0.01));
    });
  });
}

/// Parameters with gradients on the GPU, which a captured step updates in pieces: larger than a piece, transposed, and
/// small.
std::vector<torch::Tensor> parameters_of_pieces() {
  torch::manual_seed(1);
  std::vector<torch::Tensor> parameters{torch::randn({70001}), torch::randn({3, 4099}).t(), torch::randn({10})};
  for (auto& parameter : parameters) {
    parameter = parameter.to(kGpu).requires_grad_();
    parameter.mutable_grad() = torch::randn_like(parameter);
  }
  return parameters;
}

TEST_F(CudaCapturedStep, PiecesOfParametersAreUpdatedAsTheWhole) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  const auto compare = [](const char* what, const auto& make) {
    const auto eager = parameters_of_pieces(), captured = parameters_of_pieces();
    const auto eager_optimizer = make(eager), optimizer = make(captured);
    for (int i = 0; i < 4; ++i) eager_optimizer->step();
    optimizer->step();  // allocates state
    capture_and_replay([&] { optimizer->step(); }, 3);
    for (size_t i = 0; i < eager.size(); ++i) EXPECT_TRUE(eager[i].equal(captured[i])) << what << ", parameter " << i;
  };
  compare("AdamW", [](const auto& parameters) {
    return std::make_unique<FusedAdamW>(parameters, AdamWOptions(0.01).weight_decay(0.1).amsgrad(true));
  });
  compare("Adam", [](const auto& parameters) {
    return std::make_unique<FusedAdam>(parameters, torch::optim::AdamOptions(0.01));
  });
  compare("SGD", [](const auto& parameters) {
    return std::make_unique<FusedSGD>(parameters, SGDOptions(0.05).momentum(0.9).nesterov(true));
  });
  compare("plain SGD", [](const auto& parameters) { return std::make_unique<FusedSGD>(parameters, SGDOptions(0.05)); });
}

TEST_F(CudaCapturedStep, RefusesOptimizersOfLibTorchByName) {
  on_both([](ProcessGroup world) {
    Mlp model;
    model->to(kGpu);
    DistributedDataParallel ddp(model, world);
    torch::optim::AdamW optimizer(ddp.parameters(), 0.01);
    CapturedStep step(world, [&](torch::Tensor input, torch::Tensor target) { train(ddp, optimizer, input, target); });
    const auto input = inputs_of(0, world.rank(), {6}, torch::kFloat), target = targets_of(0, world.rank());
    for (int i = 0; i < 3; ++i) step(input, target);
    expect_error<UsageError>([&] { step(input, target); }, "rank ", "torch::optim::AdamW::step", "use lockstep::Fused");
    train(ddp, optimizer, input.to(kGpu), target.to(kGpu));  // still works, uncaptured
    torch::cuda::synchronize();
  });
}

TEST_F(CudaCapturedStep, TheStateCountsTheReplays) {
  on_both([](ProcessGroup world) {
    Mlp model;
    model->to(kGpu);
    DistributedDataParallel ddp(model, world);
    FusedAdamW optimizer(ddp.parameters(), 0.01);
    CapturedStep step(world, [&](torch::Tensor input, torch::Tensor target) { train(ddp, optimizer, input, target); });
    const auto input = inputs_of(0, world.rank(), {6}, torch::kFloat), target = targets_of(0, world.rank());
    for (int i = 0; i < 9; ++i) step(input, target);
    EXPECT_EQ(state_dict(optimizer)["state"][0]["step"].tensor().item<float>(), 9);
    train(ddp, optimizer, input.to(kGpu), target.to(kGpu));
    auto state = state_dict(optimizer);
    EXPECT_EQ(state["state"][0]["step"].tensor().item<float>(), 10);

    // What is loaded lies elsewhere.
    state["state"][0]["step"] = 4.0;
    load_state_dict(optimizer, state);
    EXPECT_EQ(state_dict(optimizer)["state"][0]["step"].tensor().item<float>(), 4);
    expect_error<UsageError>([&] { step(input, target); }, "rank ", "loaded", "create a new CapturedStep");
  });
}

TEST_F(CudaCapturedStep, AReplayDoesNotMakeTheHostWait) {
  on_both([](ProcessGroup world) {
    Mlp model;
    model->to(kGpu);
    DistributedDataParallel ddp(model, world);
    ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp.parameters(), world, AdamWOptions(0.01));
    CapturedStep step(world,
                      [&](torch::Tensor input, torch::Tensor target) { return train(ddp, optimizer, input, target); });
    const auto input = inputs_of(0, world.rank(), {6}, torch::kFloat).to(kGpu);
    const auto target = targets_of(0, world.rank()).to(kGpu);
    for (int i = 0; i < 4; ++i) step(input, target);
    NoWaiting no_waiting;
    for (int i = 0; i < 50; ++i) {
      optimizer.param_groups()[0].options().set_lr(0.01 / (i + 1));
      step(input, target);
    }
  });
}

TEST_F(CudaCapturedStep, SaysWhatCannotBeCaptured) {
  on_both([](ProcessGroup world) {
    const auto input = torch::ones({2}, kGpu);
    CapturedStep waiting(world, [](const torch::Tensor& x) { return x * x.sum().item<float>(); });
    for (int i = 0; i < 3; ++i) waiting(input);
    expect_error<UsageError>([&] { waiting(input); }, "rank ", "item()");
    expect_error<UsageError>([&] { waiting(input); }, "create a new CapturedStep");

    auto parameter = torch::ones({2}, torch::device(kGpu).requires_grad(true));
    FusedAdamW optimizer({parameter});
    int calls = 0;
    CapturedStep later(world, [&](const torch::Tensor& x) {
      if (++calls <= 3) return;
      (parameter * x).sum().backward();
      optimizer.step();  // for the first time
    });
    for (int i = 0; i < 3; ++i) later(input);
    expect_error<UsageError>([&] { later(input); }, "FusedAdamW: the first step");
  });
}

/// Makes the host wait in backward while `*waits`.
struct WaitInBackward : torch::autograd::Function<WaitInBackward> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, torch::Tensor x, const bool* waits) {
    context->saved_data["waits"] = reinterpret_cast<int64_t>(waits);
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (*reinterpret_cast<const bool*>(context->saved_data["waits"].toInt())) gradients[0].sum().item<float>();
    return {gradients[0], torch::Tensor()};
  }
};

TEST_F(CudaCapturedStep, AFailedCaptureLeavesTheWrapperAsItWas) {
  on_both([](ProcessGroup world) {
    Mlp model, expected;
    for (Mlp each : {model, expected}) {
      fill_parameters(*each, 1);
      each->to(kGpu);
    }
    DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 100, .cap_bytes = 300}});
    DistributedDataParallel eager(expected, world);
    FusedSGD optimizer(ddp.parameters(), SGDOptions(0.1)), eager_optimizer(eager.parameters(), SGDOptions(0.1));
    bool waits = true;
    auto body = [&](const torch::Tensor& x) {
      optimizer.zero_grad();
      auto hidden = ddp(x);
      // The last layers' gradients are in their buckets when the host waits.
      (WaitInBackward::apply(model->first(x), &waits).sum() + hidden.square().sum()).backward();
      optimizer.step();
    };
    auto step_eagerly = [&](const torch::Tensor& x) {
      eager_optimizer.zero_grad();
      (expected->first(x).sum() + eager(x).square().sum()).backward();
      eager_optimizer.step();
    };
    const auto x = inputs_of(0, world.rank(), {6}, torch::kFloat).to(kGpu);
    {
      CapturedStep step(world, body);
      for (int i = 0; i < 3; ++i) step(x);
      expect_error<UsageError>([&] { step(x); }, "cannot be captured");
    }
    body(x);
    waits = false;
    CapturedStep step(world, body);
    for (int i = 0; i < 5; ++i) step(x);
    EXPECT_TRUE(step.is_captured());
    for (int i = 0; i < 9; ++i) step_eagerly(x);
    expect_equal(model, expected, "parameter");
  });
}

TEST_F(CudaCapturedStep, WeightsReachReplays) {
  on_both([](ProcessGroup world) {
    Mlp model, expected;
    for (Mlp each : {model, expected}) {
      fill_parameters(*each, 1);
      each->to(kGpu);
    }
    DistributedDataParallel ddp(model, world), eager(expected, world);
    FusedSGD optimizer(ddp.parameters(), SGDOptions(0.1)), eager_optimizer(eager.parameters(), SGDOptions(0.1));
    CapturedStep step(world,
                      [&](const torch::Tensor& x, const torch::Tensor& y) { return train(ddp, optimizer, x, y); });
    for (int i = 0; i < 9; ++i) {
      const auto x = inputs_of(i, world.rank(), {6}, torch::kFloat).to(kGpu);
      const auto y = targets_of(i, world.rank()).to(kGpu);
      // A weight of 0 hides a gradient that is NaN.
      const bool is_empty = i % 4 == 2 && world.rank() == 0;
      const double weight = is_empty ? 0 : 1 + (i + world.rank()) % 3;
      ddp.set_batch_weight(weight);
      eager.set_batch_weight(weight);
      step(is_empty ? x * std::nan("") : x, y);
      train(eager, eager_optimizer, x, y);
    }
    EXPECT_TRUE(step.is_captured());
    expect_equal(model, expected, "parameter");
  });
}

TEST_F(CudaCapturedStep, AFirstWeightOrALoadAfterTheCaptureIsRefused) {
  on_both([](ProcessGroup world) {
    Mlp model;
    model->to(kGpu);
    DistributedDataParallel ddp(model, world);
    FusedSGD optimizer(ddp.parameters(), SGDOptions(0.1));
    const auto x = inputs_of(0, world.rank(), {6}, torch::kFloat), y = targets_of(0, world.rank());
    auto make = [&] {
      auto step = std::make_unique<CapturedStep<std::function<void(torch::Tensor, torch::Tensor)>>>(
          world, [&](torch::Tensor input, torch::Tensor target) { train(ddp, optimizer, input, target); });
      for (int i = 0; i < 5; ++i) (*step)(x, y);
      return step;
    };
    auto step = make();
    ddp.set_batch_weight(2);
    expect_error<UsageError>([&] { (*step)(x, y); }, "rank ", "set_batch_weight", "before the first call of the step");
    step = make();
    std::stringstream file;
    torch::save(model, file);
    torch::load(model, file, kGpu);
    expect_error<UsageError>([&] { (*step)(x, y); }, "rank ", "'first.weight'", "torch::load", "create a new");
    step = make();
    (*step)(x, y);
    ddp.check_replicas();
  });
}

TEST_F(CudaCapturedStep, SettingAWeightDoesNotMakeTheHostWait) {
  on_both([](ProcessGroup world) {
    Mlp model;
    model->to(kGpu);
    DistributedDataParallel ddp(model, world);
    FusedSGD optimizer(ddp.parameters(), SGDOptions(0.1));
    const auto input = inputs_of(0, world.rank(), {6}, torch::kFloat).to(kGpu);
    const auto target = targets_of(0, world.rank()).to(kGpu);
    auto step = [&] {
      ddp.set_batch_weight(1 + world.rank());
      train(ddp, optimizer, input, target);
    };
    for (int i = 0; i < 3; ++i) step();
    NoWaiting no_waiting;
    for (int i = 0; i < 20; ++i) step();
  });
}

/// LibTorch itself leaves its allocator and its random numbers as if the capture went on.
TEST_F(CudaCapturedStep, AFailedCaptureLeavesTheGpuAsItWas) {
  on_both([](ProcessGroup world) {
    const auto input = torch::ones({1000}, kGpu);
    for (int again = 0; again < 2; ++again) {
      CapturedStep waiting(world,
                           [](const torch::Tensor& x) { return torch::dropout(x, 0.5, true) * x.sum().item<float>(); });
      for (int i = 0; i < 3; ++i) waiting(input);
      EXPECT_THROW(waiting(input), UsageError);
      EXPECT_EQ((input + 1).sum().item<float>(), 2000);
      EXPECT_FALSE(torch::equal(torch::randn({8}, kGpu), torch::randn({8}, kGpu)));
    }
    CapturedStep step(world, [](const torch::Tensor& x) { return torch::dropout(x, 0.5, true); });
    for (int i = 0; i < 4; ++i) step(input);
    ASSERT_TRUE(step.is_captured());
    const auto one = step(input), other = step(input);
    EXPECT_FALSE(torch::equal(one, other)) << "each replay draws its own";
    EXPECT_NEAR(one.mean().item<float>(), 1, 0.3);
  });
}

TEST_F(CudaCapturedStep, LearningRatesReachAGraphOfTheUsers) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
  auto parameter = torch::ones({2}, torch::device(kGpu).requires_grad(true));
  parameter.mutable_grad() = torch::ones({2}, kGpu);
  FusedSGD optimizer({parameter}, SGDOptions(0.5).momentum(0.5));
  auto value = [&] { return parameter[0].item<float>(); };
  optimizer.step();
  EXPECT_EQ(value(), 0.5f);
  torch::cuda::synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  optimizer.step();
  graph.capture_end();
  EXPECT_EQ(value(), 0.5f) << "captured, not done";
  optimizer.param_groups()[0].options().set_lr(0.25);
  optimizer.before_replay();
  graph.replay();
  EXPECT_EQ(value(), 0.125f);
  load_state_dict(optimizer, state_dict(optimizer));
  expect_error<UsageError>([&] { optimizer.before_replay(); }, "loaded");
  optimizer.step();
  optimizer.before_replay();
}

/// What keeps autograd's accumulators on the default stream, which cannot be captured.
TEST_F(CudaCapturedStep, SaysThatALossIsKeptFromBefore) {
  on_both([](ProcessGroup world) {
    const auto group = world.new_group({0, 1});
    Mlp model;
    model->to(kGpu);
    DistributedDataParallel ddp(model, group);
    FusedSGD optimizer(ddp.parameters(), SGDOptions(0.1));
    const auto input = torch::ones({3, 6}, kGpu), target = torch::zeros({3}, torch::device(kGpu).dtype(torch::kLong));
    const auto kept = train(ddp, optimizer, input, target);
    CapturedStep step(group, [&](torch::Tensor x, torch::Tensor y) { return train(ddp, optimizer, x, y); });
    for (int i = 0; i < 3; ++i) step(input, target);
    expect_error<UsageError>([&] { step(input, target); }, "loss kept from an earlier step");
    world.barrier();
  });
}

TEST_F(CudaCapturedStep, ARankThatDoesNotComeIsNamed) {
  on_both([](ProcessGroup world) {
    const auto group = world.new_group({0, 1}, {.timeout = std::chrono::seconds(3)});
    {
      CapturedStep step(group, [&](const torch::Tensor& x) {
        auto sum = x.clone();
        group.all_reduce(sum);
        return sum;
      });
      const auto input = torch::full({4}, world.rank() + 1.0f, kGpu);
      for (int i = 0; i < 6; ++i) EXPECT_EQ(step(input)[0].item<float>(), 3);
      if (world.rank() == 0) {
        const auto begin = std::chrono::steady_clock::now();
        step(input);
        expect_error<TimeoutError>([&] { group.synchronize(); }, "captured_step", "captured_step_cuda_test.cpp",
                                   "3000 ms", "rank 1");
        EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
        EXPECT_THROW(step(input), TimeoutError);
      }
      world.barrier();
    }
  });
}

}  // namespace
}  // namespace lockstep
