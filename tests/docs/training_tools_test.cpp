#include <atomic>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "training_tools_snippets.h"  // namespace training_tools_page, extracted from docs/training_tools.md

#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

// The oracle is one process on the batches of all ranks.

namespace training_tools_page {
namespace {

using namespace lockstep;

constexpr int kRanks = 2;

void on_two_ranks(const std::function<void(ProcessGroup)>& body) {
  on_every_rank("shm", kRanks, body);
}

Tensor random(at::IntArrayRef sizes, uint64_t seed) {
  return torch::randn(sizes, at::detail::createCPUGenerator(seed), torch::kDouble);
}

Example<> random_batch(int64_t samples, uint64_t seed) {
  return {random({samples, 5}, seed), torch::randint(6, {samples}, at::detail::createCPUGenerator(seed), torch::kLong)};
}

/// Rank 0 has three batches, rank 1 has two.
std::vector<Example<>> batches_of(int rank) {
  if (rank == 0) return {random_batch(4, 1), random_batch(3, 2), random_batch(6, 3)};
  return {random_batch(5, 4), random_batch(2, 5)};
}

struct NetImpl : torch::nn::Module {
  NetImpl() {
    body = register_module("body", torch::nn::Linear(5, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    head = register_module("head", torch::nn::Linear(8, 6));
    to(torch::kDouble);
  }
  Tensor forward(const Tensor& x) { return head(torch::relu(norm(body(x)))); }
  torch::nn::Linear body{nullptr}, head{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

Net made() {
  Net net;
  fill_parameters(*net, 1);
  return net;
}

bool is_equal_on_all_ranks(const Tensor& tensor, const ProcessGroup& world) {
  for (const auto& other : world.all_gather_object(tensor.detach()))
    if (!other.toTensor().equal(tensor)) return false;
  return true;
}

TEST(TrainingTools, AnAverageIsEvaluatedWithItsOwnStatistics) {
  on_two_ranks([](const ProcessGroup& world) {
    auto net = made();
    DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.5);
    WeightAverage average(*net, ema(0.5));
    const auto batches = batches_of(world.rank());
    train_epoch(ddp, optimizer, average, {batches[0], batches[1]});
    const auto weight = net->body->weight.detach().clone(), mean = net->norm->running_mean.clone();

    update_average_statistics(average, ddp, batches, world);
    EXPECT_TRUE(net->norm->running_mean.equal(mean));
    auto evaluate = [&] {
      EXPECT_FALSE(net->body->weight.equal(weight));
      EXPECT_TRUE(is_equal_on_all_ranks(net->body->weight, world));
      EXPECT_TRUE(is_equal_on_all_ranks(net->norm->running_mean, world));
      EXPECT_EQ(net->norm->num_batches_tracked.item<int64_t>(), 5);
      Tensor expected = torch::zeros({8}, torch::kDouble);
      for (int rank = 0; rank < kRanks; ++rank)
        for (const auto& batch : batches_of(rank)) expected += net->body(batch.data).mean(0).detach() / 5;
      EXPECT_LT(relative_difference(net->norm->running_mean, expected), 1e-12);
      return 0.25;
    };
    EXPECT_EQ(evaluate_average(average, evaluate), 0.25);
    EXPECT_TRUE(net->body->weight.equal(weight));
    train_epoch(ddp, optimizer, average, {batches[0]});
    ddp.check_replicas();
  });
}

TEST(TrainingTools, AStepHasClippedGradients) {
  on_two_ranks([](const ProcessGroup& world) {
    auto net = made();
    DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), 100);
    const auto before = torch::nn::utils::parameters_to_vector(net->parameters()).detach();
    clipped_step(ddp, optimizer, batches_of(world.rank())[0]);
    const auto step = torch::nn::utils::parameters_to_vector(net->parameters()).detach() - before;
    EXPECT_LE(step.norm().item<double>(), 100 * (1 + 1e-5));
    EXPECT_LE(step.abs().max().item<double>(), 50);
    EXPECT_GT(step.norm().item<double>(), 0);
    ddp.check_replicas();
  });
}

TEST(TrainingTools, OptimizersHaveTheGroupsOfThePage) {
  on_two_ranks([](const ProcessGroup& world) {
    DistributedDataParallel ddp(made(), world);
    auto options_of = [](torch::optim::Optimizer& optimizer, size_t group) {
      return static_cast<const AdamWOptions&>(optimizer.param_groups()[group].options());
    };
    auto optimizer = make_optimizer(ddp);
    ASSERT_EQ(optimizer.param_groups().size(), 3u);
    EXPECT_EQ(optimizer.param_groups()[0].params().size(), 3u);
    EXPECT_EQ(options_of(optimizer, 0).weight_decay(), 0);
    EXPECT_EQ(options_of(optimizer, 1).lr(), 1e-2);
    EXPECT_EQ(options_of(optimizer, 1).weight_decay(), 0.1);
    EXPECT_EQ(options_of(optimizer, 2).lr(), 1e-3);
    auto decaying = make_decaying_optimizer(ddp);
    ASSERT_EQ(decaying.param_groups().size(), 2u);
    EXPECT_EQ(decaying.param_groups()[0].params().size(), 2u);
    EXPECT_EQ(options_of(decaying, 1).weight_decay(), 0);
  });
}

TEST(TrainingTools, MetricsAreThoseOfAllSamples) {
  on_two_ranks([](const ProcessGroup& world) {
    auto net = made();
    DistributedDataParallel ddp(net, world);
    ddp.eval();
    const auto result = measure(ddp, batches_of(world.rank()), world);
    std::vector<Tensor> data, targets;
    for (int rank = 0; rank < kRanks; ++rank)
      for (const auto& batch : batches_of(rank)) {
        data.push_back(batch.data);
        targets.push_back(batch.target);
      }
    const auto output = net(torch::cat(data)).detach(), target = torch::cat(targets);
    EXPECT_NEAR(result.loss, F::cross_entropy(output, target).item<double>(), 1e-12);
    EXPECT_EQ(result.accuracy, output.argmax(1).eq(target).sum().item<double>() / 20);
    const auto last = output.argmin(1);  // five of six classes: all but the smallest
    EXPECT_EQ(result.top5, last.ne(target).sum().item<double>() / 20);
    const auto found = output.argmax(1).eq(0), is_0 = target.eq(0);
    EXPECT_EQ(result.f1, 2 * (found & is_0).sum().item<double>() / (found.sum() + is_0.sum()).item<double>());
  });
}

TEST(TrainingTools, Rank0ReportsAnEpoch) {
  std::atomic<bool> has_rank_0 = false;  // this process, which is a rank or has them as threads
  testing::internal::CaptureStdout();
  on_two_ranks([&](const ProcessGroup& world) {
    if (world.rank() == 0) has_rank_0 = true;
    report(3, {.loss = 0.5, .accuracy = 0.25, .top5 = 0, .f1 = 0}, world);
  });
  EXPECT_EQ(testing::internal::GetCapturedStdout(), has_rank_0 ? "epoch 3  loss 0.5  accuracy 25 %\n" : "");
}

TEST(TrainingTools, SeedsBuildEqualModelsAndDropDifferentUnits) {
  if (!ranks_are_processes()) GTEST_SKIP() << "ranks that are threads share LibTorch's default generator";
  on_two_ranks([](const ProcessGroup& world) {
    const auto net = seeded_model<Net>(5, world);
    EXPECT_TRUE(is_equal_on_all_ranks(net->body->weight, world));
    const auto drawn = torch::rand({8});
    EXPECT_FALSE(is_equal_on_all_ranks(drawn, world));
    EXPECT_TRUE(seeded_model<Net>(5, world)->body->weight.equal(net->body->weight));
    EXPECT_TRUE(torch::rand({8}).equal(drawn));
  });
}

TEST(TrainingTools, GroupsOfBatchesMakeOneStepEach) {
  on_two_ranks([](const ProcessGroup& world) {
    Deep model;
    model->to(torch::kDouble);
    DistributedDataParallel ddp(model, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.1);
    std::vector<Example<>> batches;
    for (uint64_t i = 0; i < 6; ++i)
      batches.emplace_back(random({3, 6}, 10 * i + world.rank()), torch::full({3}, static_cast<int64_t>(i)));
    train_with_accumulation(ddp, optimizer, batches);
    EXPECT_EQ(ddp.logging_data().steps, 2) << "of four batches and of two";
    ddp.check_replicas();
  });
}

}  // namespace
}  // namespace training_tools_page
