// The ranks of `lockstep bench ddp`, as threads.

#include <time.h>

#include <atomic>
#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/run_threads.h>

#include "bench/rank_protocol.h"
#include "bench/ranks/ddp_sides.h"
#include "bench/ranks/ddp_training.h"
#include "bench/ranks/measure.h"
#include "bench/ranks/pinning.h"
#include "page_file.h"

namespace lockstep::bench {
namespace {

TEST(BenchModel, HasAsManyParametersAsTheOthersMeasureWith) {
  const auto count = [](const std::string& name) {
    int64_t numbers = 0;
    for (const auto& parameter : make_model(name)->parameters()) numbers += parameter.numel();
    return numbers;
  };
  EXPECT_EQ(count("small"), 118282);
  EXPECT_EQ(count("cnn"), 421834);
  EXPECT_EQ(count("mlp"), 10020874);
}

TEST(BenchModel, TakesItsInputToClasses) {
  for (const auto& name : model_names()) {
    const auto output = make_model(name)->forward(make_batch(name, 0).input);
    EXPECT_EQ(output.sizes(), (std::vector<int64_t>{kBatch, kClasses})) << name;
  }
}

TEST(BenchTraining, GoesBackToWhereItBegan) {
  const auto batch = make_batch("cnn", 0);
  const auto training = make_local_training("cnn", "sgd");
  const auto trained = [&] {
    training->reset();
    training->step(batch);
    training->step(batch);
    std::vector<at::Tensor> copies;
    for (const auto& parameter : training->parameters()) copies.push_back(parameter.detach().clone());
    return copies;
  };
  const auto first = trained(), second = trained();
  training->reset();
  EXPECT_FALSE(at::equal(first[0], training->parameters()[0]));
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i], second[i])) << i;
}

TEST(BenchTraining, BeginsEachStepWithoutGradients) {
  const auto batch = make_batch("small", 0);
  const auto training = make_local_training("small", "sgd");
  training->step(batch);
  const auto once = training->parameters()[0].grad().clone();
  training->reset();
  training->step(batch);
  EXPECT_TRUE(at::equal(training->parameters()[0].grad(), once));
}

TEST(BenchChecks, FindRightGradientsRight) {
  for (const auto& model : model_names())
    run_threads(3, [&](const ProcessGroup& world) {
      const auto local = make_local_training(model, "sgd");
      const auto ddp = make_ddp_training(model, "sgd", world);
      EXPECT_EQ(count_wrong_gradients(*ddp, *local, model, world.rank(), world.size()), 0) << model;
    });
}

TEST(BenchChecks, FindOutRanksThatDoNotTalk) {
  run_threads(2, [](const ProcessGroup& world) {
    const auto local = make_local_training("small", "sgd");
    const auto silent = make_local_training("small", "sgd");
    EXPECT_EQ(count_wrong_gradients(*silent, *local, "small", world.rank(), world.size()), 6);  // all
  });
}

TEST(BenchChecks, FindOneBit) {
  PageFile file(3);
  std::atomic<int64_t> wrong = 0;
  run_threads(3, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), 3, true);
    const std::vector<at::Tensor> tensors{at::ones({1001}), at::ones({7, 3}), at::zeros({1})};
    EXPECT_EQ(count_diverged(tensors, page), 0);
    if (world.rank() == 2) tensors[0][1000] = std::nextafter(1.0F, 2.0F);
    if (world.rank() == 1) tensors[2][0] = -0.0F;
    wrong += count_diverged(tensors, page);
  });
  EXPECT_EQ(wrong, 2);
}

/// What all ranks find wrong with parameters that should be equal after two turns.
int64_t wrong_after(const std::function<std::unique_ptr<Training>(const ProcessGroup&)>& make) {
  PageFile file(2);
  std::atomic<int64_t> wrong = 0;
  run_threads(2, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), 2, true);
    const auto training = make(world);
    TogetherSide side({*training, make_batch("small", world.rank()), 3}, TogetherSide::Check::kEqualParameters, page);
    for (int64_t turn = 1; turn < 3; ++turn) {
      side.prepare(turn);
      side.warm_up();
      side.run();
      wrong += side.count_wrong();
    }
  });
  return wrong;
}

TEST(BenchTogether, FindsOutWhoIsOutOfStep) {
  EXPECT_EQ(wrong_after([](const ProcessGroup& world) { return make_ddp_training("small", "sgd", world); }), 0);
  EXPECT_EQ(wrong_after([](const ProcessGroup&) { return make_local_training("small", "sgd"); }), 2 * 6);
}

TEST(BenchAlone, LeavesTheOthersAsTheyAre) {
  PageFile file(2);
  run_threads(2, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), 2, true);
    const auto training = make_local_training("small", "sgd");
    const auto before = training->parameters()[0].detach().clone();
    AloneSide side({*training, make_batch("small", world.rank()), 2}, page);
    side.prepare(1);
    side.warm_up();
    side.run();
    EXPECT_EQ(at::equal(training->parameters()[0], before), world.rank() != 0);
  });
}

double thread_seconds() {
  timespec used{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
}

TEST(SharedPage, LetsThoseSleepWhoWaitForTheLast) {
  constexpr int kRanks = 3;
  constexpr double kWork = 0.2;  // seconds of a core
  PageFile file(kRanks);
  std::atomic<int> arrived = 0;
  run_threads(kRanks, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), kRanks, false);
    for (int round = 1; round <= 100; ++round) {
      ++arrived;
      page.sleeping_barrier();
      EXPECT_GE(arrived.load(), kRanks * round);
    }
    const double begin = thread_seconds();
    while (world.rank() == 0 && thread_seconds() < begin + kWork) continue;
    page.sleeping_barrier();
    const double used = thread_seconds() - begin;
    EXPECT_EQ(used < kWork / 4, world.rank() != 0) << used;
  });
}

TEST(BenchPinning, EndsWithItsScope) {
  const auto before = allowed_cores();
  {
    const Pinning pinning(0, static_cast<int>(before.size()));
    EXPECT_THAT(allowed_cores(), testing::ElementsAre(before[0]));
  }
  EXPECT_EQ(allowed_cores(), before);
}

TEST(BenchMeasureDdp, TellsEverythingInItsOrder) {
  DdpPlan plan;
  plan.models = {"small"};
  plan.rounds = 5;
  plan.oversubscribed = true;
  PageFile file(2);
  std::vector<DdpMessage> told;
  run_threads(2, [&](const ProcessGroup& world) {
    SharedPage page(file.path(), world.rank(), 2, plan.oversubscribed);
    measure_ddp(plan, world, page, [&](const DdpMessage& message) { told.push_back(message); });
  });
  ASSERT_EQ(told.size(), 3U);
  EXPECT_EQ(std::get<DdpSetup>(told[0]).backend, "threads");
  EXPECT_EQ(std::get<DdpModelStarted>(told[1]).model, "small");
  const auto& samples = std::get<DdpSamples>(told[2]);
  EXPECT_EQ(samples.wrong, 0);
  EXPECT_GT(samples.steps, 1);
  for (const auto* times : {&samples.local_us, &samples.ddp_us, &samples.alone_us}) {
    ASSERT_EQ(times->size(), 5U);
    for (double time : *times) EXPECT_GT(time, 0);
  }
  EXPECT_TRUE(samples.python_us.empty());
  EXPECT_TRUE(samples.shared_us.empty());
}

TEST(BenchMeasureDdp, ComparesSharedParametersWithAdamW) {
  DdpPlan plan;
  plan.models = {"small"};
  plan.optimizer = "adamw";
  plan.rounds = 5;
  plan.oversubscribed = true;
  PageFile file(2);
  std::vector<DdpMessage> told;
  run_threads(2,
              [&](const ProcessGroup& world) {
                SharedPage page(file.path(), world.rank(), 2, plan.oversubscribed);
                measure_ddp(plan, world, page, [&](const DdpMessage& message) { told.push_back(message); });
              },
              {.backend = "shm"});
  ASSERT_EQ(told.size(), 3U);
  const auto& samples = std::get<DdpSamples>(told[2]);
  EXPECT_EQ(samples.wrong, 0);
  EXPECT_EQ(samples.shared_us.size(), 5U);
}

TEST(BenchDdpCheck, CountsParametersThatDiffer) {
  const auto batch = make_batch("small", 0);
  EXPECT_EQ(
      count_different_parameters(*make_local_training("small", "adamw"), *make_local_training("small", "adamw"), batch),
      0);
  EXPECT_EQ(
      count_different_parameters(*make_local_training("small", "adamw"), *make_local_training("small", "sgd"), batch),
      6);
}

}  // namespace
}  // namespace lockstep::bench
