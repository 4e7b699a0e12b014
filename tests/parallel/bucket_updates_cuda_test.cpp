// Updates in backward on a GPU, with ranks as processes that share one GPU.

#include <functional>

#include <c10/cuda/CUDACachingAllocator.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/captured_step.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/gradient_tools.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "parallel/gpu.h"
#include "parallel/models.h"
#include "parallel/training.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using torch::Tensor;
using torch::optim::AdamWOptions;
using torch::optim::Optimizer;

class CudaBucketUpdates : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  }
  void on_both(const std::function<void(ProcessGroup)>& body) { on_every_rank("nccl", 2, body, kGpu); }
};

torch::nn::Sequential deep_model(int64_t width, int layers) {
  torch::nn::Sequential net;
  for (int i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(width, width));
  fill_parameters(*net, 2);
  net->to(kGpu);
  return net;
}

/// Several buckets of layers whose size is a few times that of a bucket.
const DistributedDataParallelOptions kManyBuckets{
    .buckets = {.first_bytes = 100 << 10, .cap_bytes = 300 << 10, .last_bytes = 100 << 10}};

using Wrapper = DistributedDataParallel<torch::nn::SequentialImpl>;

/// The parameters after some steps, in which the learning rate changes.
std::vector<Tensor> trained(const ProcessGroup& world,
                            const std::function<std::unique_ptr<Optimizer>(Wrapper&)>& make_optimizer,
                            bool is_captured = false, const std::function<void(Wrapper&, Optimizer&)>& clip = {}) {
  auto net = deep_model(130, 6);
  Wrapper ddp(net, world, kManyBuckets);
  const auto optimizer = make_optimizer(ddp);
  const auto step = [&](const Tensor& input) {
    optimizer->zero_grad();
    ddp(input).square().mean().backward();
    if (clip) clip(ddp, *optimizer);
    optimizer->step();
  };
  CapturedStep captured(world, step);
  for (int i = 0; i < 12; ++i) {
    optimizer->param_groups()[0].options().set_lr(0.01 / (1 + i));
    const auto input = torch::full({4, 130}, 0.1 * (1 + i + world.rank()), kGpu);
    is_captured ? captured(input) : step(input);
  }
  EXPECT_EQ(captured.is_captured(), is_captured);
  ddp.check_replicas();
  std::vector<Tensor> result;
  for (const auto& parameter : ddp.parameters()) result.push_back(parameter.detach().cpu());
  return result;
}

TEST_F(CudaBucketUpdates, TrainAsUpdatesInStep) {
  on_both([](const ProcessGroup& world) {
    const auto expected =
        trained(world, [](Wrapper& ddp) { return std::make_unique<FusedAdamW>(ddp.parameters(), AdamWOptions(0.01)); });
    for (const auto& options :
         {ZeroRedundancyOptions{.overlap = Overlap::kUpdate}, ZeroRedundancyOptions{.overlap = Overlap::kGradients},
          ZeroRedundancyOptions{.shard_by = ShardBy::kParameters, .overlap = Overlap::kUpdate}})
      for (bool is_captured : {false, true}) {
        const auto actual = trained(
            world,
            [&](Wrapper& ddp) {
              auto optimizer = std::make_unique<ZeroRedundancyOptimizer<FusedAdamW>>(ddp, AdamWOptions(0.01), options);
              EXPECT_GE(ddp.bucket_plan().buckets.size(), 3);
              return optimizer;
            },
            is_captured);
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_LE(relative_difference(actual[i], expected[i]), 1e-5) << i << (is_captured ? " captured" : "");
      }
  });
}

TEST_F(CudaBucketUpdates, OfShardedGradientsAreClippedLikeWholeGradients) {
  using Sharded = ZeroRedundancyOptimizer<FusedAdamW>;
  on_both([](const ProcessGroup& world) {
    const auto expected = trained(
        world, [](Wrapper& ddp) { return std::make_unique<FusedAdamW>(ddp.parameters(), AdamWOptions(0.01)); }, false,
        [](Wrapper& ddp, Optimizer&) { clip_grad_norm_(ddp.parameters(), 0.1); });
    for (bool is_captured : {false, true}) {
      const auto actual = trained(
          world,
          [&](Wrapper& ddp) {
            return std::make_unique<Sharded>(ddp, AdamWOptions(0.01),
                                             ZeroRedundancyOptions{.overlap = Overlap::kGradients});
          },
          is_captured, [](Wrapper&, Optimizer& optimizer) { dynamic_cast<Sharded&>(optimizer).clip_grad_norm_(0.1); });
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_LE(relative_difference(actual[i], expected[i]), 1e-5) << i << (is_captured ? " captured" : "");
    }
  });
}

TEST_F(CudaBucketUpdates, DoNotMakeTheHostWait) {
  on_both([](const ProcessGroup& world) {
    Wrapper ddp(deep_model(130, 6), world, kManyBuckets);
    ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), {.overlap = Overlap::kUpdate});
    const auto input = torch::ones({4, 130}, kGpu);
    const auto step = [&] {
      ddp(input).square().mean().backward();
      optimizer.step();
    };
    for (int i = 0; i < 3; ++i) step();
    const NoWaiting guard;
    for (int i = 0; i < 20; ++i) step();
  });
}

/// Bytes that the second and third step allocate at most, beyond what is there before the model.
int64_t peak_bytes(const ProcessGroup& world, Overlap overlap) {
  using namespace c10::cuda::CUDACachingAllocator;
  const auto before = getDeviceStats(kGpu.index()).allocated_bytes[0].current;
  Wrapper ddp(deep_model(1024, 16), world, {.buckets = {.cap_bytes = 4 << 20}});
  ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), {.overlap = overlap});
  for (int i = 0; i < 3; ++i) {
    if (i == 1) resetPeakStats(kGpu.index());
    ddp(torch::ones({4, 1024}, kGpu)).square().mean().backward();
    optimizer.step();
    for (const auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
  }
  torch::cuda::synchronize();
  return getDeviceStats(kGpu.index()).allocated_bytes[0].peak - before;
}

TEST_F(CudaBucketUpdates, KeepOnlyTheShareOfTheGradients) {
  on_both([](const ProcessGroup& world) {
    const double size = 16.0 * 1024 * 1025 * 4;
    const double in_step = static_cast<double>(peak_bytes(world, Overlap::kNone)) / size;
    const double in_backward = static_cast<double>(peak_bytes(world, Overlap::kUpdate)) / size;
    // The parameters, the state's share, the gradients or their share and two buckets, and new gradients.
    EXPECT_GE(in_step, 1 + 1.0 + 1);
    EXPECT_LE(in_backward, 1 + 1.0 + 0.5 + 2.0 / 16 + 3.0 / 16);
  });
}

}  // namespace
}  // namespace lockstep
