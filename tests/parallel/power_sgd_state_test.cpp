// What a PowerSGD hook keeps from one step to the next: through overflows, through buckets that move, and through
// checkpoints.

#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint_directory.h>
#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/optimizer_state.h>
#include <lockstep/run_threads.h>
#include <lockstep/training_run.h>

#include "parallel/gradients.h"
#include "parallel/models.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

constexpr BucketLimits kStateBuckets{.first_bytes = 300, .cap_bytes = 700};
const PowerSgdOptions kAtOnce{.start_iteration = 0, .min_compression_rate = 1};

void expect_equal_bits(const std::vector<torch::Tensor>& actual, const std::vector<torch::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(torch::equal(actual[i], expected[i])) << "parameter " << i;
}

// --- overflows

/// The gradients after each of several steps. Step `overflow` is one in which rank 1 multiplies its loss by `factor`.
std::vector<std::vector<torch::Tensor>> gradients_around(ProcessGroup world, const PowerSgdOptions& options, int steps,
                                                         int overflow, float factor) {
  auto model = filled_mlp();
  DistributedDataParallel ddp(model, world, {.buckets = kStateBuckets});
  ddp.register_comm_hook(power_sgd(options));
  std::vector<std::vector<torch::Tensor>> result;
  for (int step = 0; step < steps; ++step) {
    model->zero_grad();
    const bool is_too_large = step == overflow && world.rank() == 1;
    (ddp(input_of(world.rank())).square().sum() * (is_too_large ? factor : 1.0f)).backward();
    result.emplace_back();
    for (const auto& parameter : model->parameters()) result.back().push_back(parameter.grad().clone());
  }
  return result;
}

TEST(PowerSgdOverflow, OfOneRankIsAsIfThatStepHadNotBeen) {
  for (const float factor : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()})
    for (const int overflow : {0, 1, 4})
      run_threads(2, [&](ProcessGroup world) {
        const auto with = gradients_around(world, kAtOnce, 8, overflow, factor);
        const auto without = gradients_around(world, kAtOnce, 7, -1, factor);
        for (const auto& gradient : with[overflow])
          EXPECT_TRUE(gradient.isnan().all().item<bool>()) << "rank " << world.rank() << " would make this step";
        expect_equal_bits(with.back(), without.back());
      });
}

TEST(PowerSgdOverflow, PassesWithoutWarmStart) {
  run_threads(2, [&](ProcessGroup world) {
    auto options = kAtOnce;
    options.warm_start = false;
    const auto steps = gradients_around(world, options, 4, 2, std::numeric_limits<float>::infinity());
    for (const auto& gradient : steps.back()) EXPECT_TRUE(gradient.isfinite().all().item<bool>());
  });
}

// The gradients are finite, but their products with the factors, or the sums of these, may not be.
TEST(PowerSgdOverflow, OfTheFactorsPasses) {
  run_threads(2, [&](ProcessGroup world) {
    for (const float factor : {1e15f, 1e18f, 1e19f, 1e20f, 1e36f, 1e37f, 1e38f}) {
      const auto with = gradients_around(world, kAtOnce, 8, 4, factor);
      for (const auto& gradient : with.back()) {
        EXPECT_TRUE(gradient.isfinite().all().item<bool>()) << factor;
        auto other = gradient.clone();
        world.broadcast(other, 0);
        EXPECT_TRUE(torch::equal(other, gradient)) << factor;
      }
      if (factor < 1e20f) continue;
      expect_equal_bits(with.back(), gradients_around(world, kAtOnce, 7, -1, factor).back());
    }
  });
}

TEST(PowerSgdOverflow, IsSkippedByAGradScalerOnAllRanksOnce) {
  run_threads(2, [&](ProcessGroup world) {
    auto model = filled_mlp();
    DistributedDataParallel ddp(model, world, {.buckets = kStateBuckets});
    ddp.register_comm_hook(power_sgd(kAtOnce));
    torch::optim::SGD optimizer(ddp.parameters(), 0.01);
    GradScaler scaler({.init_scale = 8, .growth_interval = 1000});
    for (int step = 0; step < 6; ++step) {
      const auto before = model->second->weight.detach().clone();
      optimizer.zero_grad();
      auto loss = ddp(input_of(world.rank())).square().mean();
      if (step == 2 && world.rank() == 1) loss = loss * std::numeric_limits<float>::infinity();
      scaler.scale(loss).backward();
      scaler.step(optimizer);
      scaler.update();
      EXPECT_EQ(torch::equal(before, model->second->weight), step == 2) << "step " << step;
      EXPECT_EQ(scaler.get_scale(), step < 2 ? 8 : 4) << "step " << step;
    }
    ddp.check_replicas();
  });
}

// --- buckets

/// A bucket with one matrix and one vector, as DistributedDataParallel gives it to a hook.
GradientBucket bucket_of(const torch::Tensor& buffer) {
  return {.index = 0,
          .is_last = true,
          .buffer = buffer,
          .gradients = {buffer.narrow(0, 0, 64).view({8, 8}), buffer.narrow(0, 64, 8)},
          .parameters = {torch::zeros({8, 8}), torch::zeros({8})},
          .names = {"weight", "bias"},
          .plan = 1};
}

torch::Tensor random_values(int step, int rank) {
  return torch::randn({72}, at::detail::createCPUGenerator(10 * step + rank));
}

TEST(PowerSgdBuckets, MayMoveBetweenSteps) {
  run_threads(2, [&](ProcessGroup world) {
    const auto last_of = [&](bool moves) {
      const auto hook = power_sgd(kAtOnce);
      auto buffer = world.allocate({72}, torch::kFloat);
      for (int step = 0; step < 6; ++step) {
        if (moves && world.rank() == 0) buffer = world.allocate({72}, torch::kFloat);
        buffer.copy_(random_values(step, world.rank()));
        hook(bucket_of(buffer), world)();
      }
      return buffer.clone();
    };
    EXPECT_TRUE(torch::equal(last_of(true), last_of(false)));
  });
}

// If the factor has a row of zeros, the product with an infinity in that column must still not be finite.
TEST(PowerSgdBuckets, AnInfinityInAColumnThatWasAlwaysZeroIsAnOverflow) {
  run_threads(2, [&](ProcessGroup world) {
    const auto hook = power_sgd(kAtOnce);
    auto buffer = world.allocate({72}, torch::kFloat);
    for (int step = 0; step < 6; ++step) {
      const auto bucket = bucket_of(buffer.copy_(random_values(step, world.rank())));
      bucket.gradients[0].select(1, 3).zero_();
      bucket.gradients[0].select(0, 5).zero_();
      if (step == 4 && world.rank() == 1) bucket.gradients[0][5][3] = std::numeric_limits<float>::infinity();
      hook(bucket, world)();
      EXPECT_EQ(buffer.isnan().all().item<bool>(), step == 4) << "step " << step;
      EXPECT_EQ(buffer.isfinite().all().item<bool>(), step != 4) << "step " << step;
    }
  });
}

TEST(PowerSgdBuckets, AnOverflowInOneLeavesTheStateOfAll) {
  run_threads(2, [&](ProcessGroup world) {
    const auto last_of = [&](bool overflows, size_t where) {
      const auto hook = power_sgd(kAtOnce);
      const torch::Tensor buffers[] = {world.allocate({72}, torch::kFloat), world.allocate({72}, torch::kFloat)};
      for (int step : overflows ? std::vector<int>{0, 1, 9, 2} : std::vector<int>{0, 1, 2}) {
        std::vector<FinishReduction> finish;
        for (size_t index : {0, 1}) {
          auto bucket =
              bucket_of(buffers[index].copy_(random_values(20 * step + static_cast<int>(index), world.rank())));
          bucket.index = index;
          bucket.is_last = index == 1;
          for (auto& name : bucket.names) name += std::to_string(index);
          if (step == 9 && index == where && world.rank() == 1) bucket.gradients[0][2][3] = INFINITY;
          finish.push_back(hook(bucket, world));
        }
        for (const auto& each : finish) each();
        for (const auto& buffer : buffers) EXPECT_EQ(buffer.isnan().all().item<bool>(), step == 9) << "step " << step;
      }
      return std::vector<torch::Tensor>{buffers[0].clone(), buffers[1].clone()};
    };
    const auto without = last_of(false, 0);
    for (size_t where : {0, 1}) expect_equal_bits(last_of(true, where), without);
  });
}

TEST(PowerSgdBuckets, WithoutNamesAreRefused) {
  run_threads(1, [&](ProcessGroup world) {
    auto bucket = bucket_of(world.allocate({72}, torch::kFloat).zero_());
    bucket.names.pop_back();
    expect_error<UsageError>([&] { power_sgd(kAtOnce)(bucket, world); }, "1 names of 2 parameters", "pass the bucket");
  });
}

// --- checkpoints

class PowerSgdTraining {
 public:
  PowerSgdTraining(const ProcessGroup& world, const PowerSgdOptions& options)
      : rank_(world.rank()),
        ddp_(model_, world, {.buckets = kStateBuckets}),
        optimizer_(ddp_.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9)),
        power_sgd_(options) {
    ddp_.register_comm_hook(power_sgd_.hook());
  }

  TrainingState state() {
    return TrainingState{}.add("model", model_).add("optimizer", optimizer_).add("power_sgd", power_sgd_);
  }
  void train(int from, int to) {
    for (int step = from; step < to; ++step) {
      const auto x = torch::randn({5, 6}, at::detail::createCPUGenerator(1000 * step + rank_));
      optimizer_.zero_grad();
      ddp_(x).square().sum().backward();
      optimizer_.step();
    }
  }
  std::vector<torch::Tensor> parameters() const {
    std::vector<torch::Tensor> copies;
    for (const auto& parameter : model_->parameters()) copies.push_back(parameter.detach().clone());
    return copies;
  }
  PowerSgdState& power_sgd() { return power_sgd_; }
  void check_replicas() { ddp_.check_replicas(); }

 private:
  const int rank_;
  Mlp model_ = filled_mlp();
  DistributedDataParallel<MlpImpl> ddp_;
  torch::optim::SGD optimizer_;
  PowerSgdState power_sgd_;
};

constexpr int kStateSteps = 6;

// Some are interrupted before compression begins, and some before or after the buckets are rebuilt.
TEST(PowerSgdState, AResumedRunHasTheBitsOfOneThatWasNotInterrupted) {
  const PowerSgdOptions cases[] = {
      {.start_iteration = 0, .min_compression_rate = 1},
      {.start_iteration = 3, .min_compression_rate = 1},
      {.rank = 2, .start_iteration = 1, .min_compression_rate = 1},
      {.start_iteration = 1, .min_compression_rate = 1, .warm_start = false},
      {.start_iteration = 0, .min_compression_rate = 1, .use_error_feedback = false},
  };
  for (const auto& options : cases)
    for (int interrupted : {1, 2, 3, 4}) {
      const TemporaryFolder folder;
      run_threads(2, [&](ProcessGroup world) {
        SCOPED_TRACE(testing::Message() << "from " << options.start_iteration << ", interrupted after " << interrupted);
        PowerSgdTraining whole(world, options), first(world, options), second(world, options);
        whole.train(0, kStateSteps);
        first.train(0, interrupted);
        CheckpointDirectory checkpoints(world, folder.path());
        ASSERT_TRUE(checkpoints.save(interrupted - 1, first.state()));
        ASSERT_EQ(checkpoints.resume(second.state()), interrupted);
        second.train(interrupted, kStateSteps);
        expect_equal_bits(second.parameters(), whole.parameters());
        EXPECT_EQ(second.power_sgd().state_dict(), whole.power_sgd().state_dict());
      });
    }
}

TEST(PowerSgdState, ATrainingRunResumesWithTheSameBits) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    const auto train = [&](const std::string& name, int epochs) {
      PowerSgdTraining training(world, kAtOnce);
      TrainingRun run(world, folder.path() / name, training.state(),
                      {.signals = {}, .progress = {.output = ProgressOptions::Output::kOff}, .live = false});
      while (run.next_epoch(epochs)) {
        const auto first = static_cast<int>(3 * run.epoch());
        for (int step = first; step < first + 3; ++step) run.step([&] { training.train(step, step + 1); });
      }
      return training.parameters();
    };
    train("interrupted", 1);
    expect_equal_bits(train("interrupted", 3), train("whole", 3));
  });
}

TEST(PowerSgdState, WithAnotherNumberOfRanksBeginsWithTheMeanOfTheErrors) {
  const TemporaryFolder folder;
  std::vector<Value> saved(2);
  run_threads(2, [&](ProcessGroup world) {
    PowerSgdTraining training(world, kAtOnce);
    training.train(0, 3);
    saved[world.rank()] = training.power_sgd().state_dict();
    EXPECT_TRUE(CheckpointDirectory(world, folder.path()).save(3, training.state()));
  });
  EXPECT_NE(saved[0]["errors"], saved[1]["errors"]);
  EXPECT_EQ(saved[0]["factors"], saved[1]["factors"]);
  for (int ranks : {1, 3})
    run_threads(ranks, [&](ProcessGroup world) {
      PowerSgdTraining training(world, kAtOnce);
      CheckpointDirectory(world, folder.path()).load(3, training.state());
      const auto loaded = training.power_sgd().state_dict();
      EXPECT_EQ(loaded["iteration"], Value(3));
      EXPECT_EQ(loaded["factors"], saved[0]["factors"]);
      ASSERT_EQ(loaded["errors"].size(), saved[0]["errors"].size());
      for (const auto& [name, error] : loaded["errors"].items())
        EXPECT_TRUE(torch::equal(error.tensor(),
                                 (saved[0]["errors"][name].tensor() + saved[1]["errors"][name].tensor()).div(2)))
            << name;
      training.train(3, 5);
      training.check_replicas();
    });
}

TEST(PowerSgdState, OfAnotherRankOrModelIsRefusedByName) {
  run_threads(2, [&](ProcessGroup world) {
    PowerSgdTraining training(world, kAtOnce);
    training.train(0, 2);
    const auto saved = training.power_sgd().state_dict();
    PowerSgdState wider({.rank = 4});
    expect_error<UsageError>([&] { wider.load_state_dict(saved); }, "state has rank 1", "option rank is 4");
    const auto use = [&](const Value& state) {
      PowerSgdTraining other(world, kAtOnce);
      other.power_sgd().load_state_dict(state);
      other.train(0, 1);
    };
    use(saved);
    auto changed = saved;
    changed["errors"].erase("second.weight");
    changed["factors"].erase("second.weight");
    expect_error<UsageError>([&] { use(changed); }, "no entry for parameter 'second.weight'", "same model");
    changed = saved;
    changed["factors"].set("fourth.weight", torch::zeros({3, 1}));
    expect_error<UsageError>([&] { use(changed); }, "entry for parameter 'fourth.weight'", "same model");
    changed = saved;
    changed["errors"].set("third.weight", torch::zeros({4, 3}));
    expect_error<UsageError>([&] { use(changed); }, "error of parameter 'third.weight' is [4, 3], expected [4, 12]",
                             "same model");
  });
}

TEST(PowerSgdState, IsSavedAsItWasLoadedBeforeTheFirstStep) {
  run_threads(2, [&](ProcessGroup world) {
    PowerSgdTraining training(world, kAtOnce);
    training.train(0, 2);
    const auto saved = training.power_sgd().state_dict();
    PowerSgdState other(kAtOnce);
    other.load_state_dict(saved);
    EXPECT_EQ(other.state_dict(), saved);
  });
}

}  // namespace
}  // namespace lockstep
