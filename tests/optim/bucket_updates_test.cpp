// Updates during backward of parameters that each rank has for itself: every bucket is reduce-scattered, updated and
// all-gathered.

#include <lockstep/zero_redundancy_optimizer.h>

#include <algorithm>
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/gradient_tools.h>
#include <lockstep/run_threads.h>

#include "optim/sharded_training.h"
#include "support/messages.h"
#include "support/rank_process.h"
#include "support/ranks.h"
#include "support/slowness.h"

namespace lockstep {
namespace {

using namespace torch::optim;
using testing::HasSubstr;

template <class Inner, class Options>
void expect_the_bits_of_updates_in_step(Cases cases, Options options, const DistributedDataParallelOptions& wrap = {},
                                        const ZeroRedundancyOptions& zero_options = {.overlap = Overlap::kUpdate}) {
  const auto [all_ranks, backends] = ranks_and_backends(cases);
  for (const int ranks : all_ranks) {
    const auto expected = trained_apart<Inner>(ranks, 3, options);
    for (const auto& backend : backends)
      run_threads(ranks,
                  [&](ProcessGroup world) {
                    Mixed model;
                    Training<MixedImpl, Inner> training(model, world, options, wrap, zero_options);
                    EXPECT_EQ(model->kernel.stride(1), 1) << "the layout stays";
                    run_steps(training.ddp, training.optimizer, world.rank(), 0, 3);
                    expect_same_bits(training.ddp.parameters(), expected, backend);
                  },
                  {.backend = backend});
  }
}

TEST(BucketUpdates, TrainToTheBitsOfUpdatesInStep) {
  expect_the_bits_of_updates_in_step<FusedAdamW>(Cases::kAll, AdamWOptions(0.01));
  expect_the_bits_of_updates_in_step<FusedAdamW>(Cases::kOne, AdamWOptions(0.01).amsgrad(true), kSmallBuckets);
  expect_the_bits_of_updates_in_step<FusedAdam>(Cases::kOne, AdamOptions(0.01).weight_decay(0.1), kSmallBuckets);
  expect_the_bits_of_updates_in_step<FusedSGD>(Cases::kOne, SGDOptions(0.01).momentum(0.9).nesterov(true),
                                               kSmallBuckets);
  expect_the_bits_of_updates_in_step<FusedSGD>(Cases::kOne, SGDOptions(0.01));
  expect_the_bits_of_updates_in_step<AdamW>(Cases::kOne, AdamWOptions(0.01), kSmallBuckets);
  expect_the_bits_of_updates_in_step<RMSprop>(Cases::kOne, RMSpropOptions(0.01), kSmallBuckets);
  expect_the_bits_of_updates_in_step<Adagrad>(Cases::kOne, AdagradOptions(0.01), kSmallBuckets);
}

TEST(BucketUpdates, DivideWholeParametersToo) {
  const ZeroRedundancyOptions whole{.shard_by = ShardBy::kParameters, .overlap = Overlap::kUpdate};
  expect_the_bits_of_updates_in_step<FusedAdamW>(Cases::kAll, AdamWOptions(0.01), kSmallBuckets, whole);
  expect_the_bits_of_updates_in_step<AdamW>(Cases::kOne, AdamWOptions(0.01), {}, whole);
}

TEST(BucketUpdates, WorkWithAStaticGraph) {
  auto wrap = kSmallBuckets;
  wrap.static_graph = true;
  expect_the_bits_of_updates_in_step<FusedAdamW>(Cases::kOne, AdamWOptions(0.01), wrap);
}

TEST(BucketUpdates, GiveEqualResultsOnAllBackends) {
  const auto expected = trained_apart<FusedAdamW>(3, 3, AdamWOptions(0.01));
  for (const auto& backend : backends_under_test())
    run_threads(3,
                [&](ProcessGroup world) {
                  Mixed model;
                  Training<MixedImpl, FusedAdamW> training(model, world, AdamWOptions(0.01), kSmallBuckets);
                  run_steps(training.ddp, training.optimizer, world.rank(), 0, 3);
                  const auto parameters = training.ddp.parameters();
                  for (size_t i = 0; i < expected.size(); ++i)
                    EXPECT_TRUE(torch::allclose(parameters[i], expected[i], 1e-5, 1e-6)) << backend << ' ' << i;
                  training.ddp.check_replicas();
                },
                {.backend = backend});
}

/// Uses its layers in the order in which they were registered, or in the reverse order.
struct OrderedImpl : torch::nn::Module {
  explicit OrderedImpl(bool is_reversed) : is_reversed(is_reversed) {
    for (int i = 0; i < 4; ++i) layers.push_back(register_module("layer" + std::to_string(i), torch::nn::Linear(6, 6)));
    fill_parameters(*this, 4);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t i = 0; i < layers.size(); ++i) x = layers[is_reversed ? layers.size() - 1 - i : i](x).tanh();
    return x;
  }
  const bool is_reversed;
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Ordered);

TEST(BucketUpdates, FollowTheOrderInWhichGradientsArrive) {
  std::vector<torch::Tensor> expected;
  const auto wrap =
      DistributedDataParallelOptions{.buckets = {.first_bytes = 100, .cap_bytes = 100, .last_bytes = 100}};
  run_threads(2, [&](ProcessGroup world) {
    Ordered model(true);
    DistributedDataParallel ddp(model, world);
    FusedAdamW optimizer(ddp.parameters(), AdamWOptions(0.01));
    run_steps(ddp, optimizer, world.rank(), 0, 4);
    if (world.rank() == 0) expected = copies(ddp.parameters());
  });
  run_threads(2, [&](ProcessGroup world) {
    Ordered model(true);
    Training<OrderedImpl, FusedAdamW> training(model, world, AdamWOptions(0.01), wrap);
    const auto sorted = [&] {
      auto plan = training.ddp.bucket_plan().buckets;
      for (auto& bucket : plan) std::sort(bucket.begin(), bucket.end());
      return plan;
    };
    auto before = sorted();
    EXPECT_EQ(before.front(), std::vector<size_t>({7})) << "the last registered one";
    run_steps(training.ddp, training.optimizer, world.rank(), 0, 4);
    auto after = sorted();
    EXPECT_LE(after.front().front(), 1) << "the first layer, which is used last";
    std::sort(before.begin(), before.end());
    std::sort(after.begin(), after.end());
    EXPECT_EQ(after, before) << "the buckets have the same parameters";
    expect_same_bits(training.ddp.parameters(), expected, "reversed");
  });
}

/// A frozen layer that backward passes late is in the bucket of a layer that it passes early.
struct FrozenBetweenImpl : torch::nn::Module {
  FrozenBetweenImpl() {
    for (const char* name : {"first", "third", "second", "fourth"})
      layers.push_back(register_module(name, torch::nn::Linear(6, 6)));
    fill_parameters(*this, 4);
    for (auto& parameter : layers[2]->parameters()) frozen.push_back(parameter);
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t i : {0, 2, 1, 3}) x = layers[i](x).tanh();
    return x;
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<torch::Tensor> frozen;
};
TORCH_MODULE(FrozenBetween);

TEST(BucketUpdates, LeaveFrozenParametersAlone) {
  run_threads(2, [&](ProcessGroup world) {
    FrozenBetween model;
    Training<FrozenBetweenImpl, FusedAdamW> training(
        model, world, AdamWOptions(0.01), {.buckets = {.first_bytes = 340, .cap_bytes = 170, .last_bytes = 170}});
    ASSERT_EQ(training.ddp.bucket_plan().buckets.front().size(), 4) << "two layers";
    for (auto& parameter : model->frozen) parameter.requires_grad_(false);
    const auto before = copies(model->frozen);
    const auto trained = model->layers[3]->weight.detach().clone();
    run_steps(training.ddp, training.optimizer, world.rank(), 0, 3);
    expect_same_bits(model->frozen, before, "frozen");
    EXPECT_FALSE(torch::equal(model->layers[3]->weight, trained));
  });
}

/// Parameter groups, a frozen parameter, gradient accumulation and weights of batches.
template <class Ddp>
void train_in_all_ways(Ddp& ddp, Optimizer& optimizer, const torch::Tensor& frozen, int rank) {
  for (int step = 0; step < 5; ++step) {
    frozen.requires_grad_(step % 2 == 0);
    optimizer.param_groups()[1].options().set_lr(0.01 * (step + 1));
    ddp.set_batch_weight(1 + (step + rank) % 3);
    {
      const auto guard = ddp.no_sync();
      ddp(input_of(100 * step + rank)).mean().backward();
    }
    ddp(input_of(100 * step + 50 + rank)).mean().backward();
    optimizer.step();
    for (const auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
  }
}

std::vector<OptimizerParamGroup> two_groups(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> first, second;
  for (size_t i = 0; i < parameters.size(); ++i) (i % 2 ? second : first).push_back(parameters[i]);
  return {OptimizerParamGroup(first, std::make_unique<AdamWOptions>(0.02)),
          OptimizerParamGroup(second, std::make_unique<AdamWOptions>(0.01))};
}

TEST(BucketUpdates, SupportGroupsFrozenParametersAccumulationAndWeights) {
  std::vector<torch::Tensor> expected;
  run_threads(2, [&](ProcessGroup world) {
    Ordered model(false);
    DistributedDataParallel ddp(model, world);
    FusedAdamW optimizer(two_groups(ddp.parameters()), AdamWOptions());
    train_in_all_ways(ddp, optimizer, model->layers[1]->weight, world.rank());
    if (world.rank() == 0) expected = copies(ddp.parameters());
  });
  run_threads(2, [&](ProcessGroup world) {
    Ordered model(false);
    DistributedDataParallel ddp(model, world, {.buckets = {.first_bytes = 100, .cap_bytes = 300, .last_bytes = 100}});
    ZeroRedundancyOptimizer<FusedAdamW> optimizer(two_groups(ddp.parameters()), ddp, AdamWOptions(),
                                                  {.overlap = Overlap::kUpdate});
    train_in_all_ways(ddp, optimizer, model->layers[1]->weight, world.rank());
    expect_same_bits(ddp.parameters(), expected, "all ways");
  });
}

TEST(BucketUpdates, SaveAndLoadTheirState) {
  Value saved, expected_state;
  std::vector<torch::Tensor> middle, expected;
  for (bool resumes : {false, true})
    run_threads(resumes ? 3 : 2, [&](ProcessGroup world) {
      Mixed model;
      Training<MixedImpl, FusedAdamW> training(model, world, AdamWOptions(0.01), kSmallBuckets);
      auto& [ddp, optimizer] = training;
      if (resumes) {
        const torch::NoGradGuard no_grad;
        for (size_t i = 0; i < middle.size(); ++i) ddp.parameters()[i].copy_(middle[i]);
        optimizer.load_state_dict(saved);
      } else {
        run_steps(ddp, optimizer, world.rank(), 0, 2);
        auto state = optimizer.consolidated_state_dict();
        if (world.rank() == 0) saved = std::move(state), middle = copies(ddp.parameters());
        world.barrier();
      }
      // All ranks get the same input, so that the number of ranks does not matter.
      ddp(input_of(77)).mean().backward();
      optimizer.step();
      auto state = optimizer.consolidated_state_dict();
      if (world.rank() != 0) return;
      if (!resumes) {
        expected = copies(ddp.parameters());
        expected_state = std::move(state);
        return;
      }
      EXPECT_EQ(state["state"][2]["step"], expected_state["state"][2]["step"]);
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_LE(relative_difference(ddp.parameters()[i], expected[i]), 1e-6) << i;
        EXPECT_LE(
            relative_difference(state["state"][i]["exp_avg"].tensor(), expected_state["state"][i]["exp_avg"].tensor()),
            1e-6)
            << i;
      }
    });
}

TEST(BucketUpdates, ConsumeGradients) {
  run_threads(2, [&](ProcessGroup world) {
    Mixed model;
    Training<MixedImpl, FusedAdamW> training(model, world, AdamWOptions(0.01), kSmallBuckets);
    auto& ddp = training.ddp;
    ddp(input_of(2)).mean().backward();
    for (const auto& parameter : ddp.parameters()) EXPECT_FALSE(parameter.grad().defined());
    expect_error<UsageError>([&] { ddp(input_of(3)).mean().backward(); },
                             "was updated in an earlier backward already; call step() after each backward");
  });
}

// With p ranks, N bytes of parameters and AdamW: N for the parameters, 2 N / p for the state, N / p for the reduced
// gradients, and memory for two buckets.
TEST(BucketUpdates, KeepOnlyTheShareOfTheGradients) {
  constexpr int kRanks = 4;
  JobProcesses job(TEST_RANKS, kRanks, {"shared_rank", "sharded_memory"});
  job.start_all();
  double bytes = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    bytes = std::max(bytes, std::stod(job[rank].expect_line("used: ").substr(6)));
    EXPECT_EQ(job[rank].wait(), 0) << job[rank].output();
  }
  EXPECT_GT(bytes, 1 + 2.0 / kRanks) << "in units of N";
  if (kSlowness == 1) {  // sanitizers keep freed memory
    EXPECT_LT(bytes, 1 + 3.0 / kRanks + 2.0 / 8 + 1.0 / 8 + 0.1) << "a bucket, and a new gradient, have N / 8";
  }
}

const std::vector<ZeroRedundancyOptions> kAllStrategies{{},
                                                        {.share_parameters = true},
                                                        {.overlap = Overlap::kGradients},
                                                        {.overlap = Overlap::kUpdate},
                                                        {.overlap = Overlap::kUpdate, .share_parameters = true}};

TEST(BucketUpdates, AreRefusedForParametersThatTheWrapperDoesNotReduce) {
  for (const auto& options : kAllStrategies)
    run_threads(2, [&](ProcessGroup world) {
      const auto refuses = [&](auto& ddp, const std::vector<torch::Tensor>& parameters, const std::string& why) {
        const auto* memory = parameters[0].data_ptr();
        expect_error<UsageError>([&] { ZeroRedundancyOptimizer<FusedAdamW>(parameters, ddp, AdamWOptions(), options); },
                                 why, "give it an optimizer of its own");
        EXPECT_EQ(parameters[0].data_ptr(), memory) << "refused before the parameters are moved";
      };
      Mixed model, second;
      DistributedDataParallel ddp(model, world), other(second, world);
      auto parameters = ddp.parameters();
      for (const auto& tensor : other.parameters()) parameters.push_back(tensor);
      refuses(ddp, parameters, "the wrapper does not reduce the gradient of parameter 5");

      parameters = ddp.parameters();
      parameters.push_back(torch::ones({3}, torch::requires_grad(world.rank() == 1)));
      refuses(ddp, parameters, world.rank() == 1 ? "parameter 5" : "on rank 1: ");

      DistributedDataParallel ignoring(second, world, {.ignore = {"scale"}});
      refuses(ignoring, ignoring.parameters(), "the wrapper does not reduce the gradient of parameter 'scale'");
    });
}

TEST(BucketUpdates, NeedTheSameOptionsOnAllRanks) {
  run_threads(2, [&](ProcessGroup world) {
    Mixed model;
    DistributedDataParallel ddp(model, world);
    for (const auto& options : kAllStrategies) {
      const auto mine = world.rank() == 1 ? options : ZeroRedundancyOptions{.shard_by = ShardBy::kParameters};
      expect_error<MismatchError>([&] { ZeroRedundancyOptimizer<FusedAdamW>(ddp, AdamWOptions(), mine); },
                                  "overlap is kNone, shard_by is kParameters and share_parameters is false on rank 0",
                                  "shard_by is kElements", "pass the same options on every rank");
    }
  });
}

TEST(BucketUpdates, NeedTheOptimizerAsLongAsBackwardRuns) {
  for (const auto& options : kAllStrategies) {
    if (options.overlap == Overlap::kNone) continue;
    run_threads(2, [&](ProcessGroup world) {
      Mixed model;
      DistributedDataParallel ddp(model, world, kSmallBuckets);
      {
        ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), options);
        run_steps(ddp, optimizer, world.rank(), 0, 1);
      }
      expect_error<UsageError>([&] { ddp(input_of(1)).mean().backward(); }, "was destroyed; keep it as long as");
    });
  }
}

TEST(BucketUpdates, LeaveParametersAloneThatTheWrapperIgnores) {
  for (auto overlap : {Overlap::kNone, Overlap::kGradients, Overlap::kUpdate})
    run_threads(2, [&](ProcessGroup world) {
      Mixed model;
      DistributedDataParallel ddp(model, world, {.ignore = {"wide"}});
      {
        const torch::NoGradGuard no_grad;
        model->wide.fill_(1 + world.rank());
      }
      ZeroRedundancyOptimizer<FusedAdamW> optimizer(ddp, AdamWOptions(0.01), {.overlap = overlap});
      EXPECT_EQ(optimizer.param_groups()[0].params().size(), 4);
      run_steps(ddp, optimizer, world.rank(), 0, 2);
      EXPECT_TRUE(model->wide.eq(1 + world.rank()).all().item<bool>());
    });
}

TEST(BucketUpdates, LeaveFrozenParametersOutsideOfTheWrapperAlone) {
  for (auto overlap : {Overlap::kNone, Overlap::kGradients, Overlap::kUpdate})
    run_threads(2, [&](ProcessGroup world) {
      Mixed model;
      DistributedDataParallel ddp(model, world, {.ignore = {"wide"}});
      model->wide.requires_grad_(false);
      const auto extra = torch::full({5000}, 1.0F + static_cast<float>(overlap != Overlap::kNone ? world.rank() : 0));
      auto parameters = ddp.parameters();
      parameters.push_back(extra);
      ZeroRedundancyOptimizer<FusedAdamW> optimizer(parameters, ddp, AdamWOptions(0.01), {.overlap = overlap});
      const auto before = extra.clone();
      run_steps(ddp, optimizer, world.rank(), 0, 2);
      EXPECT_TRUE(torch::equal(extra, before));
      ddp(input_of(world.rank())).mean().backward();
      extra.requires_grad_(true);
      expect_error<UsageError>([&] { optimizer.step(); }, "does not reduce the gradient of parameter 5");
    });
}

TEST(BucketUpdates, ThatAreInterruptedAreNotSaved) {
  const auto train = [](const ProcessGroup& world) {
    Mixed model;
    Training<MixedImpl, FusedAdamW> training(model, world, AdamWOptions(), kSmallBuckets);
    run_steps(training.ddp, training.optimizer, world.rank(), 0, 2);
    const auto loss = training.ddp(input_of(1)).mean();
    if (world.rank() == 1) throw std::runtime_error("no more samples");
    expect_error<PeerError>([&] { loss.backward(); }, "no more samples");
    expect_error<UsageError>([&] { training.optimizer.shard_state_dict(); }, "the last step did not finish");
    expect_error<UsageError>([&] { training.optimizer.step(); }, "a backward that did not finish");
  };
  EXPECT_THROW(run_threads(2, train), Error);
}

// --- gradients that are sharded until step()

const ZeroRedundancyOptions kShardedGradients{.overlap = Overlap::kGradients};

TEST(ShardedGradients, TrainToTheBitsOfUpdatesInStep) {
  expect_the_bits_of_updates_in_step<FusedAdamW>(Cases::kAll, AdamWOptions(0.01), {}, kShardedGradients);
  expect_the_bits_of_updates_in_step<FusedSGD>(Cases::kOne, SGDOptions(0.01).momentum(0.9), kSmallBuckets,
                                               kShardedGradients);
  expect_the_bits_of_updates_in_step<AdamW>(Cases::kOne, AdamWOptions(0.01), kSmallBuckets,
                                            {.shard_by = ShardBy::kParameters, .overlap = Overlap::kGradients});
}

/// Runs steps between whose backward and step() something is done with the gradients.
template <class Ddp>
void run_steps_with(Ddp& ddp, int rank, const std::function<void(int step)>& after_backward) {
  for (int step = 0; step < 4; ++step) {
    ddp(input_of(10 * step + rank)).mean().backward();
    after_backward(step);
    for (const auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
  }
}

TEST(ShardedGradients, AreClippedLikeWholeGradients) {
  for (double norm_type : {2.0, 3.0, std::numeric_limits<double>::infinity()}) {
    const ClipGradNormOptions how{.norm_type = norm_type};
    std::vector<torch::Tensor> expected;
    std::vector<double> norms;
    run_threads(3, [&](ProcessGroup world) {
      Mixed model;
      DistributedDataParallel ddp(model, world);
      FusedSGD optimizer(ddp.parameters(), SGDOptions(0.01));
      run_steps_with(ddp, world.rank(), [&](int) {
        const auto norm = clip_grad_norm_(ddp.parameters(), 0.01, how);
        optimizer.step();
        if (world.rank() == 0) norms.push_back(norm.item<double>());
      });
      if (world.rank() == 0) expected = copies(ddp.parameters());
    });
    run_threads(3, [&](ProcessGroup world) {
      Mixed model;
      Training<MixedImpl, FusedSGD> training(model, world, SGDOptions(0.01), kSmallBuckets, kShardedGradients);
      run_steps_with(training.ddp, world.rank(), [&](int step) {
        const auto norm = training.optimizer.clip_grad_norm_(0.01, how);
        EXPECT_NEAR(norm.item<double>(), norms.at(step), 1e-5 * norms.at(step));
        training.optimizer.step();
      });
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_LE(relative_difference(training.ddp.parameters()[i], expected[i]), 1e-6) << norm_type << ' ' << i;
      training.ddp.check_replicas();
    });
    EXPECT_GT(norms.at(0), 0.01) << "the gradients are clipped";
  }
}

/// With a GradScaler, whose second step overflows in one element of one parameter. Returns the scale at the end.
template <class Ddp>
double run_scaled_steps(Ddp& ddp, Optimizer& optimizer, int rank) {
  GradScaler scaler({.init_scale = 1024});
  for (int step = 0; step < 4; ++step) {
    auto loss = ddp(input_of(10 * step + rank)).mean();
    if (step == 1) loss = loss + ddp.module()->wide.index({100, 300}) * std::numeric_limits<float>::infinity();
    scaler.scale(loss).backward();
    scaler.step(optimizer);
    scaler.update();
    for (const auto& parameter : ddp.parameters()) parameter.mutable_grad().reset();
  }
  return scaler.get_scale();
}

TEST(ShardedGradients, CanBeScaled) {
  std::vector<torch::Tensor> expected;
  double scale = 0;
  run_threads(3, [&](ProcessGroup world) {
    Mixed model;
    DistributedDataParallel ddp(model, world);
    FusedAdamW optimizer(ddp.parameters(), AdamWOptions(0.01));
    const double last = run_scaled_steps(ddp, optimizer, world.rank());
    if (world.rank() == 0) scale = last, expected = copies(ddp.parameters());
  });
  EXPECT_EQ(scale, 512) << "one step was skipped";
  run_threads(3, [&](ProcessGroup world) {
    Mixed model;
    Training<MixedImpl, FusedAdamW> training(model, world, AdamWOptions(0.01), kSmallBuckets, kShardedGradients);
    EXPECT_EQ(run_scaled_steps(training.ddp, training.optimizer, world.rank()), scale);
    expect_same_bits(training.ddp.parameters(), expected, "scaled");
  });
}

TEST(ShardedGradients, ThatAreNotFiniteAreRefusedByAllRanks) {
  run_threads(3, [&](ProcessGroup world) {
    torch::nn::Linear model(6, 2);  // too small for three ranks
    Training<torch::nn::LinearImpl, FusedAdamW> training(model, world, AdamWOptions(0.01), {}, kShardedGradients);
    (training.ddp(input_of(1)).sum() * std::numeric_limits<float>::infinity()).backward();
    expect_error<Error>([&] { training.optimizer.clip_grad_norm_(1, {.error_if_nonfinite = true}); },
                        "the norm of the gradients is");
    training.optimizer.step_unless(torch::ones({1}));
    EXPECT_TRUE(torch::isfinite(model->weight).all().item<bool>());
    expect_error<UsageError>([&] { training.optimizer.step(); }, "without a backward since the last step");
    expect_error<UsageError>([&] { training.optimizer.clip_grad_norm_(1, {.norm_type = 0}); }, "norm_type is 0");
  });
}

TEST(ShardedGradients, SayWhatTheyNeed) {
  run_threads(1, [&](ProcessGroup world) {
    using Zero = ZeroRedundancyOptimizer<FusedAdamW>;
    Mixed model;
    DistributedDataParallel ddp(model, world);
    expect_error<UsageError>(
        [&] { Zero(ddp, AdamWOptions(), {.overlap = Overlap::kGradients, .share_parameters = true}); },
        "share_parameters cannot be combined with Overlap::kGradients");
    expect_error<UsageError>([&] { Zero(ddp.named_parameters(), world, AdamWOptions(), kShardedGradients); },
                             "the option overlap needs the DistributedDataParallel");
    expect_error<UsageError>([&] { Zero(ddp, AdamWOptions(), {.before_step = [] {}, .overlap = Overlap::kGradients}); },
                             "before_step cannot be combined with overlap", "call optimizer.clip_grad_norm_()");
    Zero in_step(ddp, AdamWOptions());
    expect_error<UsageError>([&] { in_step.clip_grad_norm_(1); }, "construct the optimizer with Overlap::kGradients",
                             "clip_grad_norm_(ddp.parameters(), max_norm)");

    Mixed other;
    Training<MixedImpl, FusedAdamW> training(other, world, AdamWOptions(), kSmallBuckets, kShardedGradients);
    const auto before = copies(training.ddp.parameters());
    training.ddp(input_of(1)).mean().backward();
    expect_same_bits(training.ddp.parameters(), before, "not updated yet");
    expect_error<UsageError>([&] { training.ddp(input_of(1)).mean().backward(); },
                             "has an averaged gradient of an earlier backward already; call step()");
    expect_error<UsageError>([&] { training.optimizer.step(); }, "gradients of some parameters are missing",
                             "construct the wrapper and the optimizer again");
  });
}

}  // namespace
}  // namespace lockstep
