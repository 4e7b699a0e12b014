// Models that were compiled for a GPU, with ranks as processes that share one.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/captured_step.h>
#include <lockstep/compiled_module.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>

#include "compiled/exported.h"
#include "parallel/gpu.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

using torch::Tensor;

class CudaCompiled : public testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  }
  void on_both(const std::function<void(ProcessGroup)>& body) { on_every_rank("nccl", 2, body, kGpu); }
};

TEST_F(CudaCompiled, ComputesTheLossAndGradientsOfPython) {
  for (const auto& [name, tolerance] :
       {std::pair("mlp", 1e-10), std::pair("batch_norm", 1e-10), std::pair("tied", 1e-5)}) {
    SCOPED_TRACE(name);
    const Exported exported(name);
    CompiledModule net(exported.file(), kGpu);
    const auto inputs = exported.inputs();
    const auto loss = net(inputs[0].to(kGpu), inputs[1].to(kGpu)).toTensor();
    EXPECT_EQ(loss.device(), kGpu);
    EXPECT_LT(difference(loss, exported.tensor("loss")), tolerance);
    loss.backward();
    expect_gradients(*net, exported.reference().at("gradients"), tolerance);
  }
}

TEST_F(CudaCompiled, DropsElementsByTheGeneratorOfTheGpu) {
  const Exported exported("dropout");
  CompiledModule net(exported.file(), kGpu);
  const auto ones = exported.inputs()[0].to(kGpu);
  torch::manual_seed(5);
  const auto first = net(ones).toTensor(), second = net(ones).toTensor();
  torch::manual_seed(5);
  EXPECT_TRUE(net(ones).toTensor().equal(first));
  EXPECT_FALSE(second.equal(first));
}

TEST_F(CudaCompiled, RefusesInputsOnTheCpu) {
  const Exported exported("mlp");
  CompiledModule net(exported.file(), kGpu);
  expect_error<UsageError>([&] { exported.call(net); }, "input 0 is on cpu", "the model on cuda:0");
  net->to(torch::kCPU);
  expect_error<UsageError>([&] { exported.call(net); }, "it is on cpu, but was compiled for cuda");
}

/// Trains with DistributedDataParallel and returns the parameters, one after the other.
Tensor trained(const Exported& exported, const ProcessGroup& world, bool is_captured) {
  CompiledModule net(exported.file(), kGpu);
  DistributedDataParallel ddp(net, world);
  FusedAdamW optimizer(ddp.parameters(), torch::optim::AdamWOptions(0.01));
  const auto body = [&](const Tensor& data, const Tensor& target) {
    optimizer.zero_grad();
    const auto loss = ddp(data, target).toTensor();
    loss.backward();
    optimizer.step();
    return loss;
  };
  CapturedStep step(world, body);
  const auto inputs = exported.inputs();
  const auto data = inputs[0].to(kGpu) + world.rank(), target = inputs[1].to(kGpu);
  for (int i = 0; i < 20; ++i) is_captured ? step(data, target) : body(data, target);
  EXPECT_EQ(step.is_captured(), is_captured);
  std::vector<Tensor> parameters;
  for (const auto& parameter : ddp.parameters()) parameters.push_back(parameter.detach().flatten());
  return torch::cat(parameters);
}

TEST_F(CudaCompiled, TrainsInACapturedStepAsWithoutIt) {
  on_both([](ProcessGroup world) {
    const Exported exported("mlp");
    const auto captured = trained(exported, world, true);
    EXPECT_TRUE(captured.equal(trained(exported, world, false)));
    auto of_rank_0 = captured.clone();
    world.broadcast(of_rank_0, 0);
    EXPECT_TRUE(captured.equal(of_rank_0));
  });
}

TEST_F(CudaCompiled, DropsOtherElementsInEachReplay) {
  on_both([](ProcessGroup world) {
    const Exported exported("dropout");
    CompiledModule net(exported.file(), kGpu);
    CapturedStep step(world, [&](const Tensor& ones) {
      const torch::NoGradGuard no_grad;
      return net(ones).toTensor();
    });
    const auto ones = exported.inputs()[0].to(kGpu);
    for (int i = 0; i < 4; ++i) step(ones);
    ASSERT_TRUE(step.is_captured());
    const auto first = step(ones), second = step(ones);
    EXPECT_FALSE(first.equal(second));
    EXPECT_NEAR((first == 0).to(torch::kDouble).mean().item<double>(), 0.5, 0.1);
  });
}

}  // namespace
}  // namespace lockstep
