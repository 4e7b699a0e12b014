// SyncBatchNorm with two ranks as processes that share one GPU.

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/sync_batch_norm.h>

#include "parallel/gpu.h"
#include "parallel/models.h"
#include "parallel/normalizing.h"
#include "parallel/training.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

class CudaSyncBatchNorm : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
    at::globalContext().setAllowTF32CuDNN(false);
  }
  void on_both(const std::function<void(ProcessGroup)>& body) { on_every_rank("nccl", 2, body, kGpu); }
};

/// What narrow dtypes round away of the inputs is the same in `expected`, which is in double. The layer has its inputs'
/// dtype, or wider ones. The gradients are around zero: the weight's is a sum of them times normalized inputs, and what
/// they have in common cancels out, which leaves rounding errors.
void expect_as_one_gpu(const ProcessGroup& world, const std::vector<int64_t>& sizes, const BatchNormOptions& options,
                       at::ScalarType dtype, bool is_mixed, at::MemoryFormat layout, double tolerance) {
  const auto input = random({sizes[0] + sizes[1], 3, 4, 5}, 1, dtype).to(kGpu);
  const auto gradient = (random({sizes[0] + sizes[1], 3, 4, 5}, 2) - 4).to(dtype).to(kGpu);
  const auto stats = dtype == torch::kDouble ? torch::kDouble : torch::kFloat;
  auto alone = filled<torch::nn::BatchNorm2d>(options, torch::kDouble);
  auto layer = filled<torch::nn::BatchNorm2d>(options, is_mixed ? stats : dtype);
  alone->to(kGpu);
  layer->to(kGpu);
  convert_sync_batchnorm(*layer, world);
  const auto expected = pass(alone, input.to(torch::kDouble), gradient.to(torch::kDouble));
  const auto share = share_of(sizes, world.rank());
  const auto actual = pass(layer, part(input, share).contiguous(layout), part(gradient, share).contiguous(layout));
  if (share.size > 0) {
    EXPECT_EQ(actual.output.scalar_type(), dtype);
    EXPECT_LE(relative_difference(actual.output, part(expected.output, share)), tolerance);
    EXPECT_LE(relative_difference(actual.input_gradient, part(expected.input_gradient, share)), tolerance);
  }
  if (options.track_running_stats()) {
    EXPECT_LE(relative_difference(actual.running_mean, expected.running_mean), tolerance);
    EXPECT_LE(relative_difference(actual.running_var, expected.running_var), tolerance);
  }
  if (options.affine()) {
    for (auto [mine, all] : {std::pair(actual.weight_gradient, expected.weight_gradient),
                             std::pair(actual.bias_gradient, expected.bias_gradient)}) {
      auto sum = mine.to(torch::kDouble);
      world.all_reduce(sum);
      EXPECT_LE(relative_difference(sum, all), tolerance);
    }
  }
}

TEST_F(CudaSyncBatchNorm, NormalizesByTheBatchesOfBothRanks) {
  on_both([](ProcessGroup world) {
    for (const auto& options : {BatchNormOptions(3), BatchNormOptions(3).affine(false),
                                BatchNormOptions(3).track_running_stats(false).eps(0.3)})
      for (const auto& sizes : {std::vector<int64_t>{4, 4}, {7, 2}, {0, 5}, {5, 0}})
        for (auto layout : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast})
          for (auto [dtype, tolerance] : {std::pair(torch::kDouble, 1e-12), std::pair(torch::kFloat, 2e-6),
                                          std::pair(torch::kHalf, 2e-3), std::pair(torch::kBFloat16, 2e-2)})
            for (bool is_mixed : {false, true})
              expect_as_one_gpu(world, sizes, options, dtype, is_mixed, layout, tolerance);
  });
}

TEST_F(CudaSyncBatchNorm, TheModuleTakesOneValueForEachChannelAndRefusesOneInAll) {
  on_both([](ProcessGroup world) {
    SyncBatchNorm layer(BatchNormOptions(3).momentum(torch::nullopt), world);
    torch::nn::BatchNorm1d alone(BatchNormOptions(3).momentum(torch::nullopt));
    layer->to(kGpu);
    alone->to(kGpu);
    const auto input = random({2, 3}, 1, torch::kFloat).to(kGpu);  // needs no gradient
    const auto expected = alone(input).narrow(0, world.rank(), 1);
    const auto output = layer(input.narrow(0, world.rank(), 1));
    EXPECT_LE(relative_difference(output, expected), 1e-5);
    EXPECT_LE(relative_difference(layer->running_var, alone->running_var), 1e-5);
    output.sum().backward();
    EXPECT_TRUE(layer->weight.grad().defined());
    const auto running_var = layer->running_var.clone();
    expect_error<UsageError>([&] { layer(input.narrow(0, 0, 1 - world.rank())); }, "1 values per channel");
    EXPECT_TRUE(torch::equal(layer->running_var, running_var));
  });
}

struct NormedImpl : torch::nn::Module {
  NormedImpl() {
    first = register_module("first", torch::nn::Linear(6, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    head = register_module("head", torch::nn::Linear(16, 4));
  }
  torch::Tensor forward(torch::Tensor x) { return head(torch::relu(norm(first(x)))); }
  torch::nn::Linear first{nullptr}, head{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Normed);

Normed filled_model(const ProcessGroup& world) {
  Normed model;
  fill_parameters(*model, 1);
  model->to(kGpu);
  convert_sync_batchnorm(*model, world);
  return model;
}

TEST_F(CudaSyncBatchNorm, AStepDoesNotMakeTheHostWaitAndCanBeCapturedInAGraph) {
  on_both([](ProcessGroup world) {
    auto captured = filled_model(world), eager = filled_model(world);
    const auto inputs = inputs_of(0, world.rank(), {6}, torch::kFloat).to(kGpu);
    const auto targets = targets_of(0, world.rank()).to(kGpu);
    auto step = [&](auto& ddp, auto& optimizer) {
      optimizer->zero_grad();
      torch::cross_entropy_loss(ddp(inputs), targets).backward();
      optimizer->step();
    };
    constexpr int kWarmUp = 4, kReplays = 5;
    DistributedDataParallel eager_ddp(eager, world);
    auto eager_optimizer = make_optimizer("momentum", eager->parameters());
    for (int i = 0; i < kWarmUp; ++i) step(eager_ddp, eager_optimizer);
    {
      NoWaiting no_waiting;
      for (int i = 0; i < kReplays; ++i) step(eager_ddp, eager_optimizer);
    }
    torch::cuda::synchronize();
    c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    DistributedDataParallel captured_ddp(captured, world);
    auto captured_optimizer = make_optimizer("momentum", captured->parameters());
    for (int i = 0; i < kWarmUp; ++i) step(captured_ddp, captured_optimizer);
    capture_and_replay([&] { step(captured_ddp, captured_optimizer); }, kReplays);
    const auto expected = eager->named_parameters(), parameters = captured->named_parameters();
    for (const auto& item : expected)
      EXPECT_LE(relative_difference(parameters[item.key()], item.value()), 1e-6) << item.key();
    EXPECT_LE(relative_difference(captured->norm->running_var, eager->norm->running_var), 1e-6);
  });
}

}  // namespace
}  // namespace lockstep
