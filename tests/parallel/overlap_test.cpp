// Which calls backward makes, in which order, and for which of them it waits.

#include <atomic>
#include <chrono>
#include <future>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/recompute.h>
#include <lockstep/run_threads.h>
#include <lockstep/sync_batch_norm.h>

#include "comm/group/group.h"
#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

constexpr BucketLimits kThreeBuckets{.first_bytes = 300, .cap_bytes = 900};
constexpr std::chrono::seconds kDeadline(60);  // passes only if the test fails

/// Happens on one rank, another waits for it.
class Happening {
 public:
  Happening() : future_(promise_.get_future().share()) {}

  void happens() { promise_.set_value(); }
  /// Returns whether it happened before the deadline.
  bool wait() const { return future_.wait_for(kDeadline) == std::future_status::ready; }

 private:
  std::promise<void> promise_;
  std::shared_future<void> future_;
};

/// The elements of each all_reduce that `step` makes in the group, in the order of the calls.
std::vector<int64_t> reductions_of(const ProcessGroup& group, const std::function<void()>& step) {
  const auto recorder = detail::group_of(group)->recorder();
  const auto before = recorder->records();
  step();
  std::vector<int64_t> elements;
  for (const auto& record : recorder->records())
    if (record.group == group.name() && record.call.operation == detail::Operation::kAllReduce &&
        (before.empty() || record.ticket > before.back().ticket))
      elements.push_back(record.call.elements.value_or(0));
  return elements;
}

/// A model with three buckets after two steps.
struct Trained {
  Trained(ProcessGroup world, DistributedDataParallelOptions options, CommHook hook)
      : rank(world.rank()), ddp(filled_mlp(), world, with_buckets(std::move(options))) {
    if (hook) ddp.register_comm_hook(std::move(hook));
    for (int i = 0; i < 2; ++i) step();
    EXPECT_EQ(ddp.logging_data().buckets.size(), 3u);
  }

  static DistributedDataParallelOptions with_buckets(DistributedDataParallelOptions options) {
    options.buckets = kThreeBuckets;
    return options;
  }
  void step() { ddp(input_of(rank)).square().sum().backward(); }

  const int rank;
  DistributedDataParallel<MlpImpl> ddp;
};

// --- hooks

TEST(Reductions, OfLockstepsHooksAreOnePerBucket) {
  run_threads(2, [](ProcessGroup world) {
    const std::vector<DistributedDataParallelOptions> usual{{},
                                                            {.find_unused_parameters = true},
                                                            {.static_graph = true},
                                                            {.gradient_as_bucket_view = false},
                                                            {.check_finite = true}};
    for (const auto& options : usual)
      for (const auto& hook : {CommHook(), all_reduce_hook(), fp16_compress(), bf16_compress(), power_sgd()}) {
        Trained trained(world, options, hook);
        EXPECT_EQ(reductions_of(world, [&] { trained.step(); }).size(), 3u);
      }
    Trained weighted(world, {}, bf16_compress());
    weighted.ddp.set_batch_weight(1 + world.rank());
    world.barrier();  // after the sum of the weights
    EXPECT_EQ(reductions_of(world, [&] { weighted.step(); }).size(), 3u);
  });
}

TEST(Reductions, OfAUsersHookAreFollowedByTheMarksOnlyIfTheyAreRead) {
  const CommHook users = [](const GradientBucket& bucket, const ProcessGroup& group) -> FinishReduction {
    EXPECT_EQ(bucket.gradients.size(), bucket.parameters.size());
    return all_reduce_hook()(bucket, group);
  };
  run_threads(2, [&](ProcessGroup world) {
    const auto count = [&](const DistributedDataParallelOptions& options) {
      Trained trained(world, options, users);
      return reductions_of(world, [&] { trained.step(); }).size();
    };
    EXPECT_EQ(count({}), 4u);
    EXPECT_EQ(count({.static_graph = true}), 3u);
    EXPECT_EQ(count({.static_graph = true, .check_finite = true}), 4u);
  });
}

TEST(Reductions, FindUnusedParametersWithEveryHook) {
  run_threads(2, [](ProcessGroup world) {
    for (const auto& hook : {all_reduce_hook(), fp16_compress(), bf16_compress(), power_sgd({.start_iteration = 0})}) {
      auto model = filled_mlp();
      DistributedDataParallel ddp(model, world, {.buckets = kThreeBuckets});
      ddp.register_comm_hook(hook);
      ddp(input_of(world.rank())).square().sum().backward();
      // Rank 1 uses all parameters, and learns from rank 0 that it does not.
      const auto backward = [&] {
        const auto x = input_of(world.rank());
        (world.rank() == 0 ? model->first(x) : model(x)).square().sum().backward();
      };
      expect_error<UsageError>(backward, "'second.weight'", world.rank() == 0 ? "on this rank" : "on another rank");
    }
  });
}

// --- PowerSGD

TEST(PowerSgdOverlap, TheSecondRoundStartsBeforeTheNextBucketsFirst) {
  run_threads(2, [](ProcessGroup world) {
    Trained trained(world, {}, power_sgd({.start_iteration = 0, .min_compression_rate = 1}));
    // The buckets are 4 x 12, 4 and 12; 12 x 16 and 16; 16 x 6 and 21 marks of 6 parameters.
    EXPECT_EQ(reductions_of(world, [&] { trained.step(); }),
              (std::vector<int64_t>{4 + 4 + 12, 12, 12 + 16, 16, 16 + 21, 6}));
  });
}

TEST(PowerSgdOverlap, BackwardDoesNotWaitForTheSecondRoundOfAnEarlierBucket) {
  Happening last_bucket_started_on_rank_0;
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.buckets = kThreeBuckets});
    const auto inner = power_sgd({.start_iteration = 0, .min_compression_rate = 1});
    bool is_gated = false, in_time = true;
    ddp.register_comm_hook([&](const GradientBucket& bucket, const ProcessGroup& group) {
      // Rank 1 starts the second round of the second bucket only after rank 0 has started the last bucket.
      const bool is_here = is_gated && bucket.is_last;
      if (is_here && world.rank() == 1) in_time = last_bucket_started_on_rank_0.wait();
      auto finish = inner(bucket, group);
      if (is_here && world.rank() == 0) last_bucket_started_on_rank_0.happens();
      return finish;
    });
    for (int step = 0; step < 3; ++step) {
      is_gated = step == 2;
      ddp(input_of(world.rank())).square().sum().backward();
    }
    EXPECT_TRUE(in_time) << "rank 0 waited for the second round in the middle of backward";
  });
}

TEST(PowerSgdOverlap, BackwardReportsARankThatIsLostBetweenTheRounds) {
  Happening rank_0_is_in_backward;
  run_threads_into_an_error(2,
                            [&](ProcessGroup world) {
                              auto model = filled_mlp();
                              DistributedDataParallel ddp(model, world, {.buckets = kThreeBuckets});
                              const auto inner = power_sgd({.start_iteration = 0, .min_compression_rate = 1});
                              ddp.register_comm_hook([&](const GradientBucket& bucket, const ProcessGroup& group) {
                                if (world.rank() == 0 && bucket.index == 0) rank_0_is_in_backward.happens();
                                if (world.rank() == 1 && bucket.index == 1) {
                                  EXPECT_TRUE(rank_0_is_in_backward.wait());
                                  group.abort("no more memory");
                                }
                                return inner(bucket, group);
                              });
                              const auto backward = [&] { ddp(input_of(world.rank())).square().sum().backward(); };
                              expect_error<PeerError>(backward, "rank 1 gave up: no more memory");
                            },
                            {.timeout = std::chrono::seconds(30)});
}

// --- SyncBatchNorm

/// A layer with a bucket behind it, and one before it.
struct BetweenLayersImpl : torch::nn::Module {
  BetweenLayersImpl() {
    first = register_module("first", torch::nn::Linear(6, 6));
    norm = register_module("norm", torch::nn::BatchNorm1d(6));
    last = register_module("last", torch::nn::Linear(6, 6));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(norm(first(x))); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(BetweenLayers);

/// Rank 0 holds back the reduction of the first bucket until its backward has passed the layer.
void expect_layer_overtakes_bucket(const std::string& backend) {
  Happening is_held, layer_is_passed;
  run_threads(2,
              [&](ProcessGroup world) {
                BetweenLayers model;
                fill_parameters(*model, 1);
                convert_sync_batchnorm(*model, world);
                DistributedDataParallel ddp(model, world, {.buckets = {64, 64}});
                bool is_gated = false;
                std::atomic<bool> in_time = true;
                ddp.register_comm_hook([&](const GradientBucket& bucket, const ProcessGroup& group) {
                  if (is_gated && bucket.index == 0) {
                    if (world.rank() == 1) in_time = is_held.wait();
                    const auto gate =
                        group.barrier_async();  // is done when rank 1 comes, after rank 0 has added the callback
                    if (world.rank() == 0) {
                      gate.on_done([&](const std::exception_ptr&) { in_time = layer_is_passed.wait(); });
                      is_held.happens();
                    }
                  }
                  return all_reduce_hook()(bucket, group);
                });
                model->first->weight.register_hook([&](const torch::Tensor&) {
                  if (is_gated && world.rank() == 0) layer_is_passed.happens();
                });
                for (int step = 0; step < 2; ++step) {
                  is_gated = step == 1;
                  ddp(input_of(world.rank())).square().sum().backward();
                }
                EXPECT_TRUE(in_time) << "the layer waited for a bucket";
                ddp.check_replicas();
              },
              {.backend = backend});
}

TEST(SyncBatchNormOverlap, BackwardOfALayerDoesNotWaitForBuckets) {
  for (const auto& backend : backends_under_test()) expect_layer_overtakes_bucket(backend);
}

TEST(SyncBatchNormOverlap, OnlyCallsInBackwardUseTheSideGroup) {
  run_threads(2, [](ProcessGroup world) {
    BetweenLayers model;
    convert_sync_batchnorm(*model, world);
    EXPECT_FALSE(detail::group_of(world)->side_group());
    DistributedDataParallel ddp(model, world);
    const auto side = detail::group_of(world)->side_group();
    ASSERT_TRUE(side);
    const auto calls_in = [&](const std::string& group) {
      int64_t calls = 0;
      for (const auto& record : detail::group_of(world)->recorder()->records()) calls += record.group == group;
      return calls;
    };
    const auto name = side->membership().name;
    const auto output = ddp(input_of(world.rank()));
    EXPECT_EQ(calls_in(name), 0);
    output.square().sum().backward();
    EXPECT_EQ(calls_in(name), 1);
    // A recomputed forward is part of backward.
    const auto recomputed =
        recompute([&](const torch::Tensor& x) { return model->forward(x); }, input_of(world.rank()).requires_grad_());
    EXPECT_EQ(calls_in(name), 1);
    recomputed.square().sum().backward();
    EXPECT_EQ(calls_in(name), 3);
    DistributedDataParallel another(model, world);
    EXPECT_EQ(detail::group_of(world)->side_group(), side) << "a group has one";
  });
}

TEST(SyncBatchNormOverlap, AModelWithoutSuchLayersNeedsNoSideGroup) {
  run_threads(2, [](ProcessGroup world) {
    BetweenLayers model;
    convert_sync_batchnorm(*model, world.new_group({0, 1}));
    DistributedDataParallel ddp(model, world);
    EXPECT_FALSE(detail::group_of(world)->side_group()) << "its layers have another group";
    EXPECT_EQ(world.new_group({0, 1}).name(), "world/2");
  });
}

TEST(SyncBatchNormOverlap, ALayerThatIsConvertedOnSomeRanksOnlyIsADifferenceOfTheModels) {
  run_threads(2, [](ProcessGroup world) {
    BetweenLayers model;
    if (world.rank() == 0) convert_sync_batchnorm(*model, world);
    expect_error<MismatchError>([&] { DistributedDataParallel ddp(model, world); }, "rank 1",
                                "the number of SyncBatchNorm layers is 0, rank 0 has 1");
  });
}

TEST(SyncBatchNormOverlap, ALateRankIsNamedAndBreaksTheGroup) {
  Happening is_over;
  run_threads_into_an_error(
      2,
      [&](ProcessGroup world) {
        BetweenLayers model;
        convert_sync_batchnorm(*model, world);
        DistributedDataParallel ddp(model, world);
        const auto output = ddp(input_of(world.rank()));
        if (world.rank() == 0) {
          expect_error<TimeoutError>([&] { output.square().sum().backward(); }, "SyncBatchNorm 'norm'", "all_reduce",
                                     "group 'world:side'", "rank 1");
          is_over.happens();
        } else {
          EXPECT_TRUE(is_over.wait());
        }
        expect_error<TimeoutError>([&] { world.barrier(); }, "group 'world:side'", "did not finish", "Late: rank 1");
      },
      {.timeout = std::chrono::milliseconds(500)});
}

TEST(SyncBatchNormOverlap, DestroyingTheGroupDestroysTheSideGroup) {
  run_threads(2, [](ProcessGroup world) {
    BetweenLayers model;
    convert_sync_batchnorm(*model, world);
    std::optional<DistributedDataParallel<BetweenLayersImpl>> ddp(std::in_place, model, world);
    (*ddp)(input_of(world.rank())).square().sum().backward();
    const auto side = detail::group_of(world)->side_group();
    ddp.reset();
    world.barrier();
    world.destroy();
    expect_error<UsageError>([&] { ProcessGroup(side).barrier(); }, "was destroyed");
  });
}

}  // namespace
}  // namespace lockstep
