#include <lockstep/comm_hook.h>

#include <limits>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

constexpr BucketLimits kHookBuckets{.first_bytes = 300, .cap_bytes = 700};

/// The gradients of the last of some steps with a hook, from equal inputs in each.
std::vector<torch::Tensor> gradients_with(CommHook hook, ProcessGroup world, int steps = 3) {
  auto model = filled_mlp();
  DistributedDataParallel ddp(model, world, {.buckets = kHookBuckets});
  ddp.register_comm_hook(std::move(hook));
  for (int step = 0; step < steps; ++step) {
    model->zero_grad();
    ddp(input_of(world.rank())).square().sum().backward();
  }
  std::vector<torch::Tensor> result;
  for (const auto& parameter : model->parameters()) result.push_back(parameter.grad().clone());
  return result;
}

void expect_close(const std::vector<torch::Tensor>& actual, const std::vector<torch::Tensor>& expected, double limit) {
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_LE(relative_difference(actual[i], expected[i]), limit) << i;
}

void expect_equal_on_all_ranks(const std::vector<torch::Tensor>& tensors, ProcessGroup world) {
  for (const auto& tensor : tensors) {
    auto other = tensor.clone();
    world.broadcast(other, 0);
    EXPECT_TRUE(torch::equal(other, tensor));
  }
}

TEST(CommHooks, AllReduceIsWhatHappensWithoutAHook) {
  for (const auto& backend : backends_under_test())
    run_threads(
        3, [&](ProcessGroup world) { expect_close(gradients_with(all_reduce_hook(), world), mean_gradients(3), 1e-6); },
        {.backend = backend});
}

TEST(CommHooks, SixteenBitsAreEnoughForTheAverage) {
  for (const auto& backend : backends_under_test()) {
    run_threads(3,
                [&](ProcessGroup world) {
                  auto half = gradients_with(fp16_compress(), world);
                  expect_close(half, mean_gradients(3), 1e-3);
                  expect_equal_on_all_ranks(half, world);
                  auto brain = gradients_with(bf16_compress(), world);
                  expect_close(brain, mean_gradients(3), 1e-2);
                  expect_equal_on_all_ranks(brain, world);
                  EXPECT_FALSE(torch::equal(half[0], brain[0])) << "nothing was rounded";
                },
                {.backend = backend});
  }
}

TEST(CommHooks, NothingIsSentByTheOneThatDoesNothing) {
  run_threads(2, [&](ProcessGroup world) {
    auto alone = filled_mlp();
    alone(input_of(world.rank())).square().sum().backward();
    auto actual = gradients_with(no_op_hook(), world);
    for (size_t i = 0; i < actual.size(); ++i) EXPECT_TRUE(torch::equal(actual[i], alone->parameters()[i].grad()));
  });
}

/// Uses its layers in the order in which they were registered backwards, so that the buckets are rebuilt. All layers
/// have the same size, so every plan has buckets of the same sizes.
struct BackwardsImpl : torch::nn::Module {
  BackwardsImpl() {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 6)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto layer = layers.rbegin(); layer != layers.rend(); ++layer) x = (*layer)(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};

TEST(CommHooks, AreToldWhenBucketsOfEqualSizesGetOtherGradients) {
  run_threads(2, [&](ProcessGroup world) {
    using Bucket = std::pair<int64_t, std::vector<void*>>;  // its plan and its parameters
    std::vector<Bucket> seen;
    DistributedDataParallel ddp(std::make_shared<BackwardsImpl>(), world,
                                {.buckets = {.first_bytes = 1, .cap_bytes = 1}});
    ddp.register_comm_hook([&](const GradientBucket& bucket, const ProcessGroup& group) -> FinishReduction {
      std::vector<void*> parameters;
      for (const auto& parameter : bucket.parameters) parameters.push_back(parameter.data_ptr());
      seen.emplace_back(bucket.plan, parameters);
      return all_reduce_hook()(bucket, group);
    });
    std::vector<std::vector<Bucket>> steps;
    for (int step = 0; step < 3; ++step) {
      ddp(input_of(world.rank())).square().sum().backward();
      steps.push_back(std::exchange(seen, {}));
    }
    ASSERT_EQ(steps[0].size(), steps[1].size());
    EXPECT_NE(steps[0].front().second, steps[1].front().second) << "the model must have its buckets rebuilt";
    for (size_t b = 0; b < steps[0].size(); ++b) EXPECT_NE(steps[0][b].first, steps[1][b].first);
    EXPECT_EQ(steps[1], steps[2]);
  });
}

TEST(CommHooks, OnesOwnSeesEveryBucketInOrderAndItsResultCounts) {
  run_threads(2, [&](ProcessGroup world) {
    std::vector<size_t> seen;
    int64_t elements = 0;
    CommHook twice = [&](const GradientBucket& bucket, const ProcessGroup& group) -> FinishReduction {
      EXPECT_EQ(bucket.index, seen.size());
      seen.push_back(bucket.index);
      for (size_t i = 0; i < bucket.gradients.size(); ++i) {
        EXPECT_EQ(bucket.gradients[i].sizes(), bucket.parameters[i].sizes());
        EXPECT_EQ(bucket.gradients[i].storage().data(), bucket.buffer.storage().data());
        elements += bucket.gradients[i].numel();
      }
      return [=, buffer = bucket.buffer, work = group.all_reduce_async(bucket.buffer)] {
        work.wait();
        buffer.mul_(2);
      };
    };
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.buckets = kHookBuckets});
    ddp.register_comm_hook(twice);
    ddp(input_of(world.rank())).square().sum().backward();
    EXPECT_EQ(elements, 6 * 16 + 16 + 16 * 12 + 12 + 12 * 4 + 4);
    EXPECT_GE(seen.size(), 3u);
    expect_gradients(*model, mean_gradients(2), 2 * 2);
  });
}

TEST(CommHooks, UnusedParametersAreFoundBesideAHook) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    ddp.register_comm_hook(power_sgd({.start_iteration = 0}));
    expect_error<UsageError>([&] { model->first(input_of(world.rank())).sum().backward(); }, "'second.weight'",
                             "find_unused_parameters");
  });
}

// --- PowerSGD

TEST(PowerSgd, IsTheAverageBeforeItStarts) {
  run_threads(2, [&](ProcessGroup world) {
    expect_close(gradients_with(power_sgd({.start_iteration = 10}), world), mean_gradients(2), 1e-6);
  });
}

TEST(PowerSgd, IsTheAverageWhenTheRankIsFull) {
  for (const auto& backend : backends_under_test()) {
    run_threads(3,
                [&](ProcessGroup world) {
                  auto actual =
                      gradients_with(power_sgd({.rank = 12, .start_iteration = 0, .min_compression_rate = 0}), world);
                  expect_close(actual, mean_gradients(3), 1e-5);
                  expect_equal_on_all_ranks(actual, world);
                },
                {.backend = backend});
  }
}

TEST(PowerSgd, OfRankOneIsNotTheAverageButWarmStartComesNearer) {
  run_threads(2, [&](ProcessGroup world) {
    const auto exact = mean_gradients(2);
    auto error = [&](int steps, bool warm_start) {
      auto actual = gradients_with(
          power_sgd(
              {.start_iteration = 0, .min_compression_rate = 1, .use_error_feedback = false, .warm_start = warm_start}),
          world, steps);
      expect_equal_on_all_ranks(actual, world);
      return relative_difference(actual[2], exact[2]);  // the weight of the second layer
    };
    const double once = error(1, true), often = error(20, true);
    EXPECT_GT(often, 1e-3) << "nothing was compressed";
    EXPECT_LT(often, once);
    // Power iteration ends at the best approximation of rank one.
    auto svd = torch::linalg_svd(exact[2].to(torch::kDouble), false);
    auto best = std::get<0>(svd).narrow(1, 0, 1) * std::get<1>(svd)[0] * std::get<2>(svd).narrow(0, 0, 1);
    EXPECT_NEAR(often, relative_difference(best, exact[2]), 1e-3);
  });
}

TEST(PowerSgd, FeedsBackWhatItLostSoThatSumsOfGradientsAreRight) {
  auto distance = [](bool feedback, ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    ddp.register_comm_hook(
        power_sgd({.start_iteration = 0, .min_compression_rate = 1, .use_error_feedback = feedback}));
    constexpr int kSteps = 30;
    torch::Tensor sum = torch::zeros_like(model->second->weight);
    for (int step = 0; step < kSteps; ++step) {
      model->zero_grad();
      ddp(input_of(world.rank())).square().sum().backward();
      sum += model->second->weight.grad();
    }
    return relative_difference(sum / kSteps, mean_gradients(2)[2]);
  };
  run_threads(2, [&](ProcessGroup world) {
    const double with = distance(true, world), without = distance(false, world);
    EXPECT_LT(with, without / 4);
  });
}

TEST(PowerSgd, AGradientThatIsZeroOnceComesBack) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    ddp.register_comm_hook(power_sgd({.start_iteration = 0, .min_compression_rate = 1, .use_error_feedback = false}));
    for (double factor : {0.0, 1.0}) {
      model->zero_grad();
      (ddp(input_of(world.rank())).square().sum() * factor).backward();
    }
    EXPECT_GT(model->second->weight.grad().norm().item<double>(), 1e-3 * mean_gradients(2)[2].norm().item<double>());
  });
}

TEST(PowerSgd, TrainsAboutAsWell) {
  run_threads(2, [&](ProcessGroup world) {
    auto loss_after = [&](const std::function<void(DistributedDataParallel<MlpImpl>&)>& prepare) {
      auto model = filled_mlp();
      DistributedDataParallel ddp(model, world);
      prepare(ddp);
      torch::optim::SGD optimizer(ddp.parameters(), 0.05);
      auto x = input_of(world.rank());
      auto y = torch::sin(x.narrow(1, 0, 4) * 2);
      double loss = 0;
      for (int step = 0; step < 200; ++step) {
        optimizer.zero_grad();
        auto l = torch::mse_loss(ddp(x), y);
        l.backward();
        optimizer.step();
        loss = l.item<double>();
      }
      ddp.check_replicas();
      return loss;
    };
    const double exact = loss_after([](auto&) {});
    const double compressed =
        loss_after([](auto& ddp) { ddp.register_comm_hook(power_sgd({.rank = 2, .start_iteration = 5})); });
    EXPECT_LT(compressed, exact * 1.5);
  });
}

// --- overflows

TEST(CommHooks, AnOverflowOfOneRankChangesNoLaterStep) {
  run_threads(2, [&](ProcessGroup world) {
    const auto gradients = [&](CommHook hook, bool overflows) {
      auto model = filled_mlp();
      DistributedDataParallel ddp(model, world, {.buckets = kHookBuckets});
      ddp.register_comm_hook(std::move(hook));
      std::vector<torch::Tensor> last;
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const double factor =
            overflows && step == 1 && world.rank() == 1 ? std::numeric_limits<double>::infinity() : 1.0;
        (ddp(input_of(world.rank())).square().sum() * factor).backward();
        if (factor > 1 || (overflows && step == 1)) {
          EXPECT_FALSE(model->first->weight.grad().isfinite().any().item<bool>());
        }
      }
      for (const auto& parameter : model->parameters()) last.push_back(parameter.grad().clone());
      return last;
    };
    for (const auto& make : {all_reduce_hook, fp16_compress, bf16_compress}) {
      const auto with = gradients(make(), true), without = gradients(make(), false);
      for (size_t i = 0; i < with.size(); ++i) EXPECT_TRUE(torch::equal(with[i], without[i])) << "parameter " << i;
    }
  });
}

}  // namespace
}  // namespace lockstep
