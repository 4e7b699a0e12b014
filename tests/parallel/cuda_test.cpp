// DistributedDataParallel with ranks as processes that share one GPU.

#include <chrono>
#include <optional>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>

#include "parallel/gpu.h"
#include "parallel/models.h"
#include "parallel/training.h"
#include "support/log_lines.h"
#include "support/messages.h"
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

// Whichever reduction it is: none is left out.
TEST_F(Cuda, AParameterThatOneRankFreezesIsReportedInTheNextForward) {
  on_every_rank(
      "nccl", 2,
      [&](ProcessGroup world) {
        Mlp model;
        model->to(kGpu);
        DistributedDataParallel ddp(model, world);
        const auto input = torch::ones({5, 6}, kGpu);
        for (int round = 0; round < 10; ++round) {
          ddp(input).sum().backward();
          model->second->bias.set_requires_grad(world.rank() != 1);
          EXPECT_NO_THROW(ddp(input).sum().backward());
          model->second->bias.set_requires_grad(true);
          expect_error<MismatchError>([&] { ddp(input); }, "rank " + std::to_string(world.rank()),
                                      "'second.bias' was frozen on some ranks");
        }
      },
      kGpu);
}

TEST_F(Cuda, AStepAfterNoSyncAloneIsWarnedOf) {
  on_every_rank(
      "nccl", 2,
      [&](ProcessGroup world) {
        for (const bool is_under_no_sync : {false, true}) {
          const LogLines lines;
          Mlp model;
          model->to(kGpu);
          DistributedDataParallel ddp(model, world);
          torch::optim::SGD optimizer(ddp.parameters(), 0.1);
          const auto input = torch::ones({5, 6}, kGpu);
          {
            auto guard = ddp.no_sync();
            ddp(input).sum().backward();
            if (is_under_no_sync) optimizer.step();
          }
          if (!is_under_no_sync) optimizer.step();
          ddp(input);
          EXPECT_THAT(lines.lines(), testing::Contains(testing::HasSubstr("the replicas have diverged")));
        }
      },
      kGpu);
}

// Each tag has a connection of its own.
TEST_F(Cuda, RefusesMoreTagsThanItCanConnect) {
  on_every_rank(
      "nccl", 2,
      [&](ProcessGroup world) {
        if (world.rank() == 1) {
          const auto tensor = torch::zeros({4}, kGpu);
          std::vector<Work> receives;  // nobody sends, so nothing is connected
          for (uint32_t tag = 0; tag < 64; ++tag) receives.push_back(world.recv_async(tensor, 0, tag));
          try {
            receives.push_back(world.recv_async(tensor, 0, 64));
            ADD_FAILURE() << "tag 64 was accepted";
          } catch (const UsageError& error) {
            EXPECT_NE(std::string(error.what()).find("64 different tags"), std::string::npos) << error.what();
          }
        }
        const auto sum = torch::ones({4}, kGpu);
        world.all_reduce(sum);
        EXPECT_EQ(sum.sum().item<int>(), 4 * world.size()) << "the group still works";
      },
      kGpu);
}

// The host queues such a step in a fraction of the time that the device needs.
TEST_F(Cuda, LoggingDataHasTheTimesOfTheDevice) {
  on_every_rank(
      "nccl", 2,
      [&](ProcessGroup world) {
        constexpr int64_t kWidth = 4096, kBatch = 8192;
        torch::nn::Sequential model(torch::nn::Linear(kWidth, kWidth), torch::nn::Linear(kWidth, kWidth),
                                    torch::nn::Linear(kWidth, kWidth));
        model->to(kGpu);
        DistributedDataParallel ddp(model, world);
        const auto inputs = torch::ones({kBatch, kWidth}, kGpu);
        at::cuda::CUDAEvent begin(cudaEventDefault), between(cudaEventDefault), end(cudaEventDefault);
        double queued_ms = 0;
        for (int step = 0; step < 20; ++step) {
          torch::cuda::synchronize();
          const auto host_begin = std::chrono::steady_clock::now();
          begin.record();
          const auto loss = ddp(inputs).sum();
          between.record();
          loss.backward();
          end.record();
          queued_ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - host_begin).count();
          if (step == 15) {  // step number 16, the last one that is measured
            const auto data = ddp.logging_data();
            const double forward_ms = begin.elapsed_time(between), backward_ms = between.elapsed_time(end);
            EXPECT_GT(forward_ms + backward_ms, 2 * queued_ms) << "the model is too small for this test";
            EXPECT_NEAR(data.forward_ms, forward_ms, 0.1 * forward_ms);
            EXPECT_NEAR(data.backward_ms, backward_ms, 0.1 * backward_ms);
            EXPECT_GT(data.buckets.size(), 1u);
            for (const auto& bucket : data.buckets) {
              EXPECT_LE(bucket.full_ms, bucket.started_ms);
              EXPECT_LE(bucket.started_ms, bucket.reduced_ms);
              EXPECT_LE(bucket.reduced_ms, data.backward_ms + 0.1);
            }
            EXPECT_LT(data.buckets[0].reduced_ms, data.backward_ms / 2) << "overlaps with the rest of backward";
            EXPECT_GT(data.overlap, 0);
          }
        }
        EXPECT_EQ(ddp.logging_data().steps, 20);
        EXPECT_EQ(ddp.logging_data().measured_step, 16);
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
