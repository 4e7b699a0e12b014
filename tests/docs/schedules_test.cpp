#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/lr_scheduler.h>

#include "schedules_snippets.h"  // namespace schedules_page, extracted from docs/schedules.md

#include "parallel/models.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace schedules_page {
namespace {

using namespace lockstep;

constexpr int kRanks = 2;

void on_two_ranks(const std::function<void(ProcessGroup)>& body) {
  on_every_rank("shm", kRanks, body);
}

torch::nn::Linear made_linear() {
  torch::nn::Linear net(6, 4);
  fill_parameters(*net, 1);
  return net;
}

std::vector<Example<>> batches_of(int rank, int count) {
  std::vector<Example<>> batches;
  for (int i = 0; i < count; ++i) {
    const auto seed = static_cast<uint64_t>(100 * rank + i);
    batches.push_back({torch::randn({3, 6}, at::detail::createCPUGenerator(seed)),
                       torch::randint(4, {3}, at::detail::createCPUGenerator(seed), torch::kLong)});
  }
  return batches;
}

double rate_of(const torch::optim::Optimizer& optimizer) {
  return optimizer.param_groups()[0].options().get_lr();
}

TEST(SchedulesPage, TheFirstProgramFollowsHalfACosine) {
  on_two_ranks([](const ProcessGroup& world) {
    DistributedDataParallel ddp(made_linear(), world);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1));
    train(ddp, optimizer, batches_of(world.rank(), 5), /*epochs=*/2);
    EXPECT_NEAR(rate_of(optimizer), 0, 1e-17);
    ddp.check_replicas();
  });
}

TEST(SchedulesPage, EpochsDecayAfterTheirMilestones) {
  on_two_ranks([](const ProcessGroup& world) {
    DistributedDataParallel ddp(made_linear(), world);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1));
    train_by_epoch(ddp, optimizer, batches_of(world.rank(), 2), /*epochs=*/60);
    EXPECT_DOUBLE_EQ(rate_of(optimizer), 0.01);
  });
}

TEST(SchedulesPage, WarmUpEndsAtTheBaseRate) {
  torch::optim::SGD optimizer(made_linear()->parameters(), torch::optim::SGDOptions(0.1));
  LRScheduler scheduler(optimizer, warm_up_then_cosine(/*warm_up=*/4, /*steps=*/20));
  EXPECT_DOUBLE_EQ(rate_of(optimizer), 0.001);
  for (int step = 0; step < 4; ++step) scheduler.step();
  EXPECT_DOUBLE_EQ(rate_of(optimizer), 0.1);
  for (int step = 4; step < 20; ++step) scheduler.step();
  EXPECT_NEAR(rate_of(optimizer), 0, 1e-16);
}

TEST(SchedulesPage, AFormulaIsAFunctionOfTheStep) {
  torch::optim::SGD optimizer(made_linear()->parameters(), torch::optim::SGDOptions(0.1));
  LRScheduler scheduler(optimizer, inverse_square_root(/*warm_up=*/4));
  for (int step = 0; step < 15; ++step) scheduler.step();
  EXPECT_DOUBLE_EQ(rate_of(optimizer), 0.1 * std::sqrt(4.0 / 16));
}

TEST(SchedulesPage, RanksReduceTheirRatesTogether) {
  on_two_ranks([](const ProcessGroup& world) {
    DistributedDataParallel ddp(made_linear(), world);
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1));
    const auto validate = [&] { return world.rank() == 0 ? 1.0 : 2.0; };
    train_until_plateau(ddp, optimizer, batches_of(world.rank(), 2), /*epochs=*/5, validate, world);
    EXPECT_DOUBLE_EQ(rate_of(optimizer), 0.1 * 0.5);  // the first epoch is the best one, and the patience is 3
  });
}

TEST(SchedulesPage, AResumedTrainingHasTheSameRates) {
  on_two_ranks([](const ProcessGroup& world) {
    const TemporaryFolder own;
    const auto root = world.broadcast_object(own.path().string(), 0).toStringRef();
    const auto batches = batches_of(world.rank(), 3);
    const auto trained = [&](const std::string& folder, std::vector<int64_t> ends) {
      torch::Tensor weights;
      for (const int64_t end : ends) {
        auto net = made_linear();
        DistributedDataParallel ddp(net, world);
        torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        train_or_resume(ddp, optimizer, batches, end, root + "/" + folder, world);
        weights = net->weight.detach().clone();
      }
      return weights;
    };
    EXPECT_TRUE(trained("parts", {1, 3, 5}).equal(trained("whole", {5})));
    world.barrier();  // before rank 0 removes the folder
  });
}

}  // namespace
}  // namespace schedules_page
