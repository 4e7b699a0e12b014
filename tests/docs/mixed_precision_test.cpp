#include <gtest/gtest.h>
#include <torch/torch.h>

#include "mixed_precision_snippets.h"  // namespace mixed_precision_page, extracted from docs/mixed_precision.md

#include "support/ranks.h"

namespace mixed_precision_page {
namespace {

using namespace lockstep;

void on_two_processes(const std::function<void(ProcessGroup)>& body) {
  on_every_rank("shm", 2, body);
}

/// The same on every rank, so that the losses before and after training compare.
torch::nn::Linear new_model() {
  torch::manual_seed(1);
  return torch::nn::Linear(6, 2);
}

Tensor samples_of(int rank) {
  return torch::randn({16, 6}, at::detail::createCPUGenerator(rank));
}

Tensor labels_of(int rank) {
  return (samples_of(rank).sum(1) > 0).to(torch::kLong);
}

double loss_of(torch::nn::Linear& model, int rank) {
  const torch::NoGradGuard no_grad;
  return F::cross_entropy(model(samples_of(rank).to(model->weight.scalar_type())).to(torch::kFloat), labels_of(rank))
      .item<double>();
}

TEST(MixedPrecisionPage, AutocastTrains) {
  on_two_processes([](const ProcessGroup& world) {
    auto model = new_model();
    DistributedDataParallel ddp(model, world);
    FusedAdamW optimizer(ddp.parameters(), 0.05);
    const double before = loss_of(model, world.rank());
    for (int step = 0; step < 20; ++step)
      step_in_bfloat16(ddp, optimizer, samples_of(world.rank()), labels_of(world.rank()));
    EXPECT_LT(loss_of(model, world.rank()), 0.8 * before);
    ddp.check_replicas();
  });
}

TEST(MixedPrecisionPage, AScalerTrains) {
  on_two_processes([](const ProcessGroup& world) {
    auto model = new_model();
    DistributedDataParallel ddp(model, world);
    FusedAdamW optimizer(ddp.parameters(), 0.05);
    GradScaler scaler;
    const double before = loss_of(model, world.rank());
    for (int step = 0; step < 20; ++step)  // CPUs have float16 in LibTorch 2.1 and later only
      step_with_scaler(ddp, optimizer, scaler, samples_of(world.rank()), labels_of(world.rank()), torch::kBFloat16);
    EXPECT_LT(loss_of(model, world.rank()), 0.8 * before);
    ddp.check_replicas();
  });
}

TEST(MixedPrecisionPage, MasterWeightsTrain) {
  on_two_processes([](const ProcessGroup& world) {
    auto model = new_model();
    const double before = loss_of(model, world.rank());
    train_in_bfloat16(model, world, samples_of(world.rank()), labels_of(world.rank()));
    EXPECT_EQ(model->weight.scalar_type(), torch::kBFloat16);
    EXPECT_LT(loss_of(model, world.rank()), before);
  });
}

}  // namespace
}  // namespace mixed_precision_page
