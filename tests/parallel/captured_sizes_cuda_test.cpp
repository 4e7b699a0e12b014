// CapturedStep with inputs of several sizes.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <c10/cuda/CUDACachingAllocator.h>

#include <lockstep/captured_step.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fused_optimizers.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "parallel/captured_training.h"
#include "support/messages.h"

namespace lockstep {
namespace {

using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

class CudaCapturedSizes : public CudaCapturedStep {};

TEST_F(CudaCapturedSizes, IsCapturedWithSizesThatComeTwice) {
  on_both([](ProcessGroup world) {
    CapturedStep step(world, [](const torch::Tensor& x) { return x * 2; });
    for (auto [rows, is_captured] :
         {std::pair(5, false), {4, false}, {4, false}, {3, false}, {4, true}, {2, true}, {4, true}}) {
      EXPECT_TRUE(torch::equal(step(torch::ones({rows}, kGpu)), torch::full({rows}, 2.0, kGpu)));
      EXPECT_EQ(step.is_captured(), is_captured);
    }
    EXPECT_EQ(step.graphs(), 1);
  });
}

/// Trains two models alike, one of them captured, with inputs of three sizes in turn.
template <class Make>
void expect_the_same_training_with_three_sizes(const ProcessGroup& world, const char* what, const Make& make) {
  SCOPED_TRACE(what);
  Mlp eager, captured;
  for (Mlp model : {eager, captured}) {
    fill_parameters(*model, 1);
    model->to(kGpu);
  }
  DistributedDataParallel eager_ddp(eager, world), ddp(captured, world);
  auto eager_optimizer = make(eager_ddp.parameters()), optimizer = make(ddp.parameters());
  int runs = 0;
  CapturedStep step(world, [&](const torch::Tensor& input, const torch::Tensor& target) {
    ++runs;
    return train(ddp, *optimizer, input, target);
  });
  std::vector<torch::Tensor> losses, expected;
  for (int i = 0; i < 24; ++i) {
    const int64_t rows = std::vector{3, 2, 1}[static_cast<size_t>(7 * i % 5 % 3)];
    const auto input = inputs_of(i, world.rank(), {6}, torch::kFloat).narrow(0, 0, rows).to(kGpu);
    const auto target = targets_of(i, world.rank()).narrow(0, 0, rows).to(kGpu);
    for (auto* one : {eager_optimizer.get(), optimizer.get()})
      one->param_groups()[0].options().set_lr(0.01 / (1 + i % 4));
    for (auto* one : {&eager_ddp, &ddp}) one->set_batch_weight(1 + (i + world.rank()) % 3);
    losses.push_back(step(input, target));
    expected.push_back(train(eager_ddp, *eager_optimizer, input, target).detach());
  }
  EXPECT_EQ(step.graphs(), 3);
  EXPECT_LE(runs, 3 + 2 * 3) << "the warm-up, and each size once normally and once captured";
  expect_equal(captured, eager, what);
  for (size_t i = 0; i < losses.size(); ++i)
    EXPECT_NEAR(losses[i].item<double>(), expected[i].item<double>(), 1e-5) << what << ", step " << i;
  ddp.check_replicas();
}

TEST_F(CudaCapturedSizes, EachSizeHasItsOwnGraph) {
  on_both([](ProcessGroup world) {
    expect_the_same_training_with_three_sizes(world, "AdamW", [](const auto& parameters) {
      return std::make_unique<FusedAdamW>(parameters, AdamWOptions(0.01).weight_decay(0.1));
    });
    expect_the_same_training_with_three_sizes(world, "SGD", [](const auto& parameters) {
      return std::make_unique<FusedSGD>(parameters, SGDOptions(0.05).momentum(0.9));
    });
    expect_the_same_training_with_three_sizes(world, "sharded", [&](const auto& parameters) {
      return std::make_unique<ZeroRedundancyOptimizer<FusedAdamW>>(parameters, world, AdamWOptions(0.01));
    });
  });
}

TEST_F(CudaCapturedSizes, ReplacesTheGraphThatWasNotUsedForTheLongestTime) {
  on_both([](ProcessGroup world) {
    int runs = 0;
    CapturedStep step(world,
                      [&](const torch::Tensor& x) {
                        ++runs;
                        return x * 2;
                      },
                      {.warm_up = 1, .max_graphs = 2});
    const auto runs_with = [&](int64_t rows) {
      const int before = runs;
      EXPECT_TRUE(torch::equal(step(torch::full({rows}, rows, kGpu)), torch::full({rows}, 2 * rows, kGpu)));
      return runs - before;
    };
    for (int64_t rows : {1, 1, 2, 2}) EXPECT_EQ(runs_with(rows), 1) << "normally, then captured";
    EXPECT_EQ(step.graphs(), 2);
    EXPECT_EQ(runs_with(1), 0);
    EXPECT_EQ(runs_with(3), 1);
    EXPECT_EQ(runs_with(3), 1) << "captured, in place of the graph for 2 rows";
    EXPECT_EQ(step.graphs(), 2);
    EXPECT_EQ(runs_with(1), 0);
    EXPECT_EQ(runs_with(3), 0);
    EXPECT_EQ(runs_with(2), 1);
    for (int64_t rows : {4, 5}) EXPECT_EQ(runs_with(rows), 1);
    EXPECT_EQ(runs_with(2), 1) << "two other sizes came in between, so it is new again";
    EXPECT_EQ(runs_with(1), 0);
    EXPECT_EQ(runs_with(2), 1) << "captured";
    EXPECT_EQ(runs_with(2), 0);
    EXPECT_EQ(runs_with(1), 0);
    EXPECT_EQ(runs_with(3), 1) << "it was replaced";
  });
}

TEST_F(CudaCapturedSizes, GraphsShareTemporaryMemory) {
  on_both([](ProcessGroup world) {
    constexpr int64_t kTemporary = 256 << 20;
    const auto reserved = [] {
      return c10::cuda::CUDACachingAllocator::getDeviceStats(kGpu.index()).reserved_bytes[0].current;
    };
    CapturedStep step(world,
                      [](const torch::Tensor& x) {
                        auto large = torch::full({kTemporary / 4}, 2.0, torch::device(kGpu)) + x.sum();
                        return large.mean();
                      },
                      {.warm_up = 1});
    const auto call = [&](int64_t rows) { EXPECT_EQ(step(torch::ones({rows}, kGpu)).item<float>(), 2.0 + rows); };
    for (int i = 0; i < 2; ++i) call(1);
    const auto with_one_graph = reserved();
    for (int64_t rows = 2; rows < 6; ++rows)
      for (int i = 0; i < 3; ++i) call(rows);
    EXPECT_EQ(step.graphs(), 5);
    EXPECT_LT(reserved() - with_one_graph, kTemporary / 2);
    for (int64_t rows = 1; rows < 6; ++rows) call(rows);
  });
}

TEST_F(CudaCapturedSizes, EachGraphKnowsTheMomentumThatItContains) {
  on_both([](ProcessGroup world) {
    auto parameter = torch::ones({2}, torch::device(kGpu).requires_grad(true));
    FusedSGD optimizer({parameter}, SGDOptions(0.5).momentum(0.5));
    CapturedStep step(world, [&](const torch::Tensor& x) {
      optimizer.zero_grad();
      (parameter * x.sum()).sum().backward();
      optimizer.step();
    });
    const auto few = torch::ones({1}, kGpu), many = torch::ones({2}, kGpu);
    for (int i = 0; i < 4; ++i) step(few);
    static_cast<SGDOptions&>(optimizer.param_groups()[0].options()).momentum(0.9);
    for (int i = 0; i < 3; ++i) step(many);
    EXPECT_EQ(step.graphs(), 2);
    expect_error<UsageError>([&] { step(few); }, "rank ", "other than the learning rate changed");
    step(many);
  });
}

TEST_F(CudaCapturedSizes, AFailedCaptureOfASecondSizeLeavesTheWrapperAsItWas) {
  on_both([](ProcessGroup world) {
    Mlp model, expected;
    for (Mlp each : {model, expected}) {
      fill_parameters(*each, 1);
      each->to(kGpu);
    }
    DistributedDataParallel ddp(model, world), eager(expected, world);
    FusedSGD optimizer(ddp.parameters(), SGDOptions(0.1)), eager_optimizer(eager.parameters(), SGDOptions(0.1));
    const auto x = inputs_of(0, world.rank(), {6}, torch::kFloat).to(kGpu), y = targets_of(0, world.rank()).to(kGpu);
    const auto few_x = x.narrow(0, 0, 2), few_y = y.narrow(0, 0, 2);
    auto body = [&](const torch::Tensor& input, const torch::Tensor& target) {
      if (input.size(0) == 2) target.sum().item<int64_t>();
      return train(ddp, optimizer, input, target);
    };
    {
      CapturedStep step(world, body);
      for (int i = 0; i < 5; ++i) step(x, y);
      step(few_x, few_y);
      step(x, y);
      expect_error<UsageError>([&] { step(few_x, few_y); }, "rank ", "item()");
      expect_error<UsageError>([&] { step(x, y); }, "create a new CapturedStep");
    }
    body(few_x, few_y);
    {
      CapturedStep step(world, body);
      for (int i = 0; i < 5; ++i) step(x, y);
      EXPECT_TRUE(step.is_captured());
    }
    for (int i = 0; i < 13; ++i)
      train(eager, eager_optimizer, i == 5 || i == 7 ? few_x : x, i == 5 || i == 7 ? few_y : y);
    expect_equal(model, expected, "parameter");
  });
}

}  // namespace
}  // namespace lockstep
