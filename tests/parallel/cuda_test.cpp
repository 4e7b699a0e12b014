// DistributedDataParallel with ranks as processes that share one GPU.

#include <optional>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>

#include "parallel/gpu.h"
#include "parallel/models.h"
#include "parallel/training.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using Options = DistributedDataParallelOptions;

constexpr int kGpuSteps = 10;

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
    at::globalContext().setAllowTF32CuDNN(false);
  }
};

/// A step's inputs and targets: of one rank, or of all of them one after the other.
std::pair<torch::Tensor, torch::Tensor> gpu_batch(int step, int first_rank, int ranks) {
  std::vector<torch::Tensor> inputs, targets;
  for (int rank = first_rank; rank < first_rank + ranks; ++rank) {
    inputs.push_back(inputs_of(step, rank, {6}, torch::kFloat));
    targets.push_back(targets_of(step, rank));
  }
  return {torch::cat(inputs).to(kGpu), torch::cat(targets).to(kGpu)};
}

TEST_F(Cuda, TrainsAsOneProcessDoesOnAllOfTheBatch) {
  for (const auto* optimizer : {"momentum", "adam"}) {
    for (const auto& options : {Options{}, Options{.static_graph = true}, Options{.buckets = {100, 200}},
                                Options{.gradient_as_bucket_view = false}}) {
      on_every_rank(
          "nccl", 2,
          [&](ProcessGroup world) {
            Mlp alone, shared;
            for (Mlp model : {alone, shared}) {
              fill_parameters(*model, 1);
              model->to(kGpu);
            }
            DistributedDataParallel ddp(shared, world, options);
            auto alone_optimizer = make_optimizer(optimizer, alone->parameters());
            auto shared_optimizer = make_optimizer(optimizer, shared->parameters());
            for (int step = 0; step < kGpuSteps; ++step) {
              auto [all_inputs, all_targets] = gpu_batch(step, 0, world.size());
              alone_optimizer->zero_grad();
              torch::cross_entropy_loss(alone(all_inputs), all_targets).backward();
              alone_optimizer->step();
              auto [inputs, targets] = gpu_batch(step, world.rank(), 1);
              shared_optimizer->zero_grad();
              torch::cross_entropy_loss(ddp(inputs), targets).backward();
              shared_optimizer->step();
            }
            auto expected = alone->parameters();
            auto parameters = shared->parameters();
            for (size_t i = 0; i < expected.size(); ++i)
              EXPECT_LE(relative_difference(parameters[i], expected[i]), 1e-5) << optimizer << ", parameter " << i;
          },
          kGpu);
    }
  }
}

TEST_F(Cuda, AStepDoesNotMakeTheHostWait) {
  on_every_rank(
      "nccl", 2,
      [&](ProcessGroup world) {
        Mlp model;
        model->to(kGpu);
        DistributedDataParallel ddp(model, world, {.buckets = {100, 200}});
        auto optimizer = make_optimizer("momentum", model->parameters());
        auto [inputs, targets] = gpu_batch(0, world.rank(), 1);
        for (int step = 0; step < 6; ++step) {
          std::optional<NoWaiting> no_waiting;
          if (step >= 2) no_waiting.emplace();  // the first plans the buckets anew
          optimizer->zero_grad();
          torch::cross_entropy_loss(ddp(inputs), targets).backward();
          optimizer->step();
        }
        EXPECT_EQ(ddp.logging_data().steps, 6);
      },
      kGpu);
}

TEST_F(Cuda, AStepCanBeCapturedInAGraph) {
  on_every_rank(
      "nccl", 2,
      [&](ProcessGroup world) {
        Mlp captured, eager;
        for (Mlp model : {captured, eager}) {
          fill_parameters(*model, 1);
          model->to(kGpu);
        }
        DistributedDataParallel eager_ddp(eager, world);
        auto captured_optimizer = make_optimizer("momentum", captured->parameters());
        auto eager_optimizer = make_optimizer("momentum", eager->parameters());
        auto [inputs, targets] = gpu_batch(0, world.rank(), 1);
        auto step = [&](auto& ddp, auto& optimizer) {
          optimizer->zero_grad();
          torch::cross_entropy_loss(ddp(inputs), targets).backward();
          optimizer->step();
        };
        constexpr int kWarmUp = 4, kReplays = 5;
        for (int i = 0; i < kWarmUp + kReplays; ++i) step(eager_ddp, eager_optimizer);

        // Autograd accumulates on the stream that a model is wrapped on, so it must be one that can be captured.
        torch::cuda::synchronize();
        c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
        DistributedDataParallel captured_ddp(captured, world);
        for (int i = 0; i < kWarmUp; ++i) step(captured_ddp, captured_optimizer);
        capture_and_replay([&] { step(captured_ddp, captured_optimizer); }, kReplays);
        auto expected = eager->parameters(), parameters = captured->parameters();
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_LE(relative_difference(parameters[i], expected[i]), 1e-6) << "parameter " << i;
      },
      kGpu);
}

}  // namespace
}  // namespace lockstep
