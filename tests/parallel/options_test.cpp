// What the options of DistributedDataParallel do, one by one.

#include <cmath>

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

constexpr BucketLimits kSmallBuckets{.first_bytes = 100, .cap_bytes = 300};

TEST(Options, GradientsMayHaveMemoryOfTheirOwn) {
  const auto expected = mean_gradients(2);
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.gradient_as_bucket_view = false, .buckets = kSmallBuckets});
    for (int times = 1; times <= 2; ++times) {
      ddp(input_of(world.rank())).square().sum().backward();
      expect_gradients(*model, expected, times);
    }
    const auto kept = model->first->weight.grad();
    const auto copy = kept.clone();
    for (auto& parameter : model->parameters()) parameter.mutable_grad().reset();
    ddp(input_of(world.rank() + 7)).square().sum().backward();
    EXPECT_TRUE(torch::equal(kept, copy)) << "a gradient that was kept changed with the next backward";
    EXPECT_FALSE(torch::equal(model->first->weight.grad(), copy));
  });
}

TEST(Options, WithoutInitSyncNothingIsComparedAndNothingTaken) {
  run_threads(2, [&](ProcessGroup world) {
    Mlp model;
    fill_parameters(*model, 1 + world.rank());
    auto before = model->first->weight.clone();
    DistributedDataParallel ddp(model, world, {.init_sync = false});
    EXPECT_TRUE(torch::equal(model->first->weight, before));
    ddp.sync_parameters_and_buffers();
    EXPECT_EQ(torch::equal(model->first->weight, before), world.rank() == 0);
  });
}

TEST(Options, IgnoredTensorsAreLeftAlone) {
  run_threads(2, [&](ProcessGroup world) {
    ConvNet model;
    fill_parameters(*model, 1 + world.rank());
    model->norm->running_mean.fill_(world.rank());
    auto before = model->head->bias.clone();
    DistributedDataParallel ddp(model, world, {.ignore = {"head.bias", "norm.running_mean"}});
    EXPECT_TRUE(torch::equal(model->head->bias, before));
    EXPECT_EQ(model->norm->running_mean[0].item<float>(), static_cast<float>(world.rank()));
    EXPECT_EQ(ddp.parameters().size(), model->parameters().size()) << "an optimizer trains them all the same";
    auto image = torch::ones({2, 1, 6, 6}) * (world.rank() + 1.0);
    ddp(image).select(1, 0).sum().mul(world.rank() + 1.0).backward();
    EXPECT_EQ(model->head->bias.grad()[0].item<float>(), 2.0f * (world.rank() + 1)) << "this rank's own";
    expect_error<UsageError>([&] { DistributedDataParallel other(model, world, {.ignore = {"head.bais"}}); },
                             "'head.bais'", "no such parameter or buffer");
  });
}

TEST(Options, BucketsArePlannedAnewAsGradientsCome) {
  struct BackwardsImpl : torch::nn::Module {  // registered in another order than used
    BackwardsImpl() {
      third = register_module("third", torch::nn::Linear(8, 8));
      first = register_module("first", torch::nn::Linear(8, 8));
      second = register_module("second", torch::nn::Linear(8, 8));
    }
    torch::Tensor forward(torch::Tensor x) { return third(second(first(x))); }
    torch::nn::Linear first{nullptr}, second{nullptr}, third{nullptr};
  };
  run_threads(2, [&](ProcessGroup world) {
    auto model = std::make_shared<BackwardsImpl>();
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 300, .cap_bytes = 300}});
    const auto before = ddp.bucket_plan().buckets;
    auto x = torch::ones({2, 8});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(x).sum().mul(world.rank() + 1.0).backward();
      EXPECT_EQ(model->third->bias.grad()[0].item<float>(), 3.0f);
    }
    const auto after = ddp.bucket_plan().buckets;
    EXPECT_NE(before, after);
    EXPECT_TRUE(after.front()[0] == 0 || after.front()[0] == 1) << "the last layer's gradients come first";
    EXPECT_TRUE(after.back().back() == 2 || after.back().back() == 3) << "the first layer's come last";
  });
}

TEST(Options, AStaticGraphRemembersWhichParametersAreUnused) {
  struct PartlyImpl : torch::nn::Module {
    PartlyImpl() {
      used = register_module("used", torch::nn::Linear(6, 2));
      unused = register_module("unused", torch::nn::Linear(6, 2));
    }
    torch::Tensor forward(torch::Tensor x, bool both) { return both ? used(x) + unused(x) : used(x); }
    torch::nn::Linear used{nullptr}, unused{nullptr};
  };
  run_threads_into_an_error(2, [&](ProcessGroup world) {
    auto model = std::make_shared<PartlyImpl>();
    fill_parameters(*model, 1);
    DistributedDataParallel ddp(model, world, {.buckets = kSmallBuckets});
    ddp.set_static_graph();
    torch::Tensor first;
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      ddp(input_of(world.rank()), false).sum().backward();
      EXPECT_FALSE(model->unused->weight.grad().defined());
      if (step == 0) first = model->used->weight.grad().clone();
      EXPECT_TRUE(torch::equal(model->used->weight.grad(), first));
    }
    EXPECT_TRUE(ddp.logging_data().is_static_graph);
    expect_error<UsageError>([&] { ddp(input_of(world.rank()), true).sum().backward(); }, "'unused.",
                             "but 0 in the first one", "not static");
  });
}

TEST(Options, AStaticGraphIsSaidBeforeTheFirstBackward) {
  run_threads(1, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    ddp(input_of(0)).sum().backward();
    expect_error<UsageError>([&] { ddp.set_static_graph(); }, "rank 0", "after the first backward",
                             "static_graph = true");
  });
}

TEST(Options, NamesTheRankAndTheParameterWhoseGradientIsNotFinite) {
  run_threads(3, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.check_finite = true});
    ddp(input_of(world.rank())).sum().backward();
    model->zero_grad();
    auto x = input_of(world.rank());
    if (world.rank() == 1) x[0][0] = std::numeric_limits<float>::infinity();
    auto loss = model->third(model->second(model->first(x)));
    expect_error<Error>([&] { loss.sum().backward(); }, "rank " + std::to_string(world.rank()), "NaN or infinite",
                        "on rank 1", "backward number 2", "of parameter '");
    model->zero_grad();
    ddp(input_of(world.rank())).sum().backward();  // the group goes on
  });
}

TEST(Options, NamesTheFirstParameterInWhichReplicasDiffer) {
  run_threads(3, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.check_replicas_every = 2});
    ddp(input_of(world.rank()));  // compares
    if (world.rank() == 2) {
      torch::NoGradGuard no_grad;
      model->second->bias[3] += 1e-7;
    }
    ddp(input_of(world.rank()));  // does not
    auto expect_difference = [&](const std::function<void()>& look) {
      expect_error<MismatchError>(look, "rank " + std::to_string(world.rank()) + ":", "'second.bias'", "on rank 2",
                                  "sync_parameters_and_buffers");
    };
    expect_difference([&] { ddp(input_of(world.rank())); });
    expect_difference([&] { ddp.check_replicas(); });
    ddp.sync_parameters_and_buffers();
    ddp.check_replicas();
  });
}

TEST(Options, WeightsMakeUnequalBatchesOneBatch) {
  const std::vector<int> sizes{1, 7, 4};
  auto batch = [&](int rank, int step) {
    return torch::randn({sizes[(rank + step) % 3], 6}, at::detail::createCPUGenerator(10 * rank + step));
  };
  run_threads(3, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.buckets = kSmallBuckets});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      auto x = batch(world.rank(), step);
      ddp.set_batch_weight(static_cast<double>(x.size(0)));
      ddp(x).square().mean().backward();
      Mlp whole = filled_mlp();
      whole(torch::cat({batch(0, step), batch(1, step), batch(2, step)})).square().mean().backward();
      for (size_t i = 0; i < model->parameters().size(); ++i)
        EXPECT_LE(relative_difference(model->parameters()[i].grad(), whole->parameters()[i].grad()), 1e-6) << i;
    }
    expect_error<UsageError>([&] { ddp.set_batch_weight(-1); }, "rank", "is -1", "0 or more", "number of samples");
    expect_error<UsageError>([&] { ddp.set_batch_weight(std::nan("")); }, "rank", "0 or more");
  });
}

// Each micro-batch counts by its own weight; the mean of an empty batch is NaN and must not spread.
TEST(Options, WeightsHoldForEachAccumulatedBackward) {
  const std::vector<std::vector<int>> sizes{{1, 7, 0}, {5, 0, 2}, {0, 3, 3}};  // by micro-batch and rank
  auto batch = [&](int rank, int part) {
    return torch::randn({sizes[part][rank], 6}, at::detail::createCPUGenerator(10 * rank + part));
  };
  auto whole = filled_mlp();
  for (int part = 0; part < 3; ++part)
    whole(torch::cat({batch(0, part), batch(1, part), batch(2, part)})).square().mean().backward();
  for (bool views : {true, false}) {
    run_threads(3, [&](ProcessGroup world) {
      auto model = filled_mlp();
      DistributedDataParallel ddp(model, world, {.gradient_as_bucket_view = views, .buckets = kSmallBuckets});
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        for (int part = 0; part < 3; ++part) {
          auto x = batch(world.rank(), part);
          ddp.set_batch_weight(static_cast<double>(x.size(0)));
          auto loss = ddp(x).square().mean();
          if (part < 2) {
            auto guard = ddp.no_sync();
            loss.backward();
          } else {
            loss.backward();
          }
        }
        for (size_t i = 0; i < model->parameters().size(); ++i)
          EXPECT_LE(relative_difference(model->parameters()[i].grad(), whole->parameters()[i].grad()), 1e-6) << i;
      }
    });
  }
}

TEST(Options, WeightsOfZeroOnAllRanksAreRefusedAndTheWrapperGoesOn) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world);
    ddp.set_batch_weight(0);
    expect_error<UsageError>([&] { ddp(input_of(world.rank())).square().sum().backward(); },
                             "rank " + std::to_string(world.rank()), "0 on all ranks", "skip");
    ddp.set_batch_weight(1);
    model->zero_grad();
    ddp(input_of(world.rank())).square().sum().backward();
    expect_gradients(*model, mean_gradients(2));
  });
}

TEST(Options, OutputsMoveToTheOutputDeviceAndInputsToTheModels) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.device_ids = {torch::Device("cpu")}, .output_device = torch::kMeta});
    EXPECT_TRUE(ddp(input_of(0)).is_meta());
    expect_error<UsageError>(
        [&] {
          DistributedDataParallel two(model, world, {.device_ids = {torch::Device("cpu"), torch::Device("cpu")}});
        },
        "2 devices", "one rank for each");
    expect_error<UsageError>([&] { DistributedDataParallel other(model, world, {.device_ids = {torch::kMeta}}); },
                             "device_ids is meta", "the group's device is cpu");
  });
}

struct EchoImpl : torch::nn::Module {
  EchoImpl() { weight = register_parameter("weight", torch::ones({1})); }
  const at::Tensor& forward(const at::Tensor& input) { return input; }
  at::Tensor weight;
};

TEST(Options, AResultThatRefersToAnArgumentOutlivesTheCopyForTheDevice) {
  run_threads(2, [&](ProcessGroup world) {
    DistributedDataParallel ddp(std::make_shared<EchoImpl>(), world, {.device_ids = {torch::Device("cpu")}});
    static_assert(!std::is_reference_v<decltype(ddp(torch::ones({2})))>);
    EXPECT_TRUE(torch::equal(ddp(torch::full({2}, 3.0)), torch::full({2}, 3.0)));
  });
}

TEST(Options, SynchronizesBuffersWhenAsked) {
  run_threads(3, [&](ProcessGroup world) {
    ConvNet model;
    DistributedDataParallel ddp(model, world, {.broadcast_buffers = false});
    model->norm->running_var.fill_(world.rank() + 2);
    ddp.sync_buffers();
    EXPECT_TRUE(torch::equal(model->norm->running_var, torch::full({4}, 2.0f)));
  });
}

TEST(Options, TrainAndEvalReachTheModule) {
  run_threads(1, [&](ProcessGroup world) {
    ConvNet model;
    DistributedDataParallel ddp(model, world);
    ddp.eval();
    EXPECT_FALSE(model->norm->is_training());
    ddp.train();
    EXPECT_TRUE(model->norm->is_training());
    EXPECT_EQ(ddp.named_parameters()[0].first, "conv.weight");
  });
}

}  // namespace
}  // namespace lockstep
