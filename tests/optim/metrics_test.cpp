// Metrics, seeds and printing. The oracle of the metrics is one process on the samples of all ranks.

#include <lockstep/metrics.h>

#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <iomanip>
#include <iostream>
#include <set>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/print.h>
#include <lockstep/seed.h>
#include <lockstep/training_state.h>

#include "optim/stepping.h"
#include "support/messages.h"
#include "support/ranks.h"

namespace lockstep {
namespace {

static_assert(detail::HasState<SumMetric> && detail::HasState<MeanMetric> && detail::HasState<Accuracy>,
              "can be added to a TrainingState");

TEST(MeanMetric, WeightsTheBatchesOfAllRanksByTheirSamples) {
  const auto losses = numbers({11}, 1, torch::kDouble);
  on_every_rank("shm", 2, [&](const ProcessGroup& world) {
    MeanMetric loss(world.device());
    const auto mine = losses.split_with_sizes({8, 3})[world.rank()];
    for (const auto& batch : mine.split(3)) loss.add(batch.mean(), static_cast<double>(batch.size(0)));
    EXPECT_NEAR(loss.compute(world), losses.mean().item<double>(), 1e-14);
    EXPECT_NEAR(loss.compute(world), losses.mean().item<double>(), 1e-14) << "computing does not change the sums";
    EXPECT_NEAR(loss.compute(), mine.mean().item<double>(), 1e-14);
    loss.reset();
    EXPECT_TRUE(std::isnan(loss.compute(world)));
  });
}

TEST(MeanMetric, TakesNumbersAndTensorsOfAnyShape) {
  for (auto device : devices_under_test()) {
    MeanMetric mean(device);
    mean.add(3, 2);
    mean.add(torch::tensor({{1.0f, 2.0f}}).to(device).requires_grad_());
    mean.add(torch::tensor({4, 6}).to(device), torch::tensor({0.5, 2.0}));
    mean.add(torch::tensor(NAN), 0);  // the mean of an empty batch
    mean.add(torch::tensor({NAN}), torch::tensor({0}));
    mean.add(torch::zeros({0}));
    EXPECT_NEAR(mean.compute(), (6. + 3 + 2 + 12) / (2 + 2 + 2.5), 1e-14);
    mean.add(NAN);
    EXPECT_TRUE(std::isnan(mean.compute()));
    expect_error<UsageError>([&] { mean.add(torch::ones({2}), torch::ones({3})); }, "[3]", "expected [2]");
  }
}

TEST(Accuracy, CountsSamplesWhoseLabelIsAmongTheLargestOutputs) {
  const auto logits = numbers({40, 7}, 1, torch::kFloat);
  const auto labels = torch::randint(7, {40}, at::detail::createCPUGenerator(2), torch::kLong);
  auto expected = [&](int64_t top_k) {
    int correct = 0;
    for (int64_t i = 0; i < 40; ++i) {
      std::vector<std::pair<float, int64_t>> outputs;
      for (int64_t c = 0; c < 7; ++c) outputs.emplace_back(-logits[i][c].item<float>(), c);
      std::sort(outputs.begin(), outputs.end());
      for (int64_t k = 0; k < top_k; ++k) correct += outputs[k].second == labels[i].item<int64_t>();
    }
    return correct / 40.;
  };
  for (int64_t top_k : {1, 3, 7})
    on_every_rank("shm", 2, [&, expected = expected(top_k)](const ProcessGroup& world) {
      Accuracy accuracy(world.device(), {.top_k = top_k});
      const auto begin = world.rank() == 0 ? 0 : 30, end = world.rank() == 0 ? 30 : 40;
      for (auto at = begin; at < end; at += 10)
        accuracy.add(logits.slice(0, at, at + 10), labels.slice(0, at, at + 10));
      EXPECT_EQ(accuracy.compute(world), expected);
    });
  EXPECT_GT(expected(3), expected(1));
}

TEST(Accuracy, TakesPixelsAndIgnoresALabel) {
  const auto logits = numbers({2, 5, 3, 4}, 1, torch::kFloat);
  auto labels = logits.argmax(1);
  Accuracy accuracy, with_ignored(torch::kCPU, {.ignore_index = -100});
  accuracy.add(logits, labels);
  EXPECT_EQ(accuracy.compute(), 1);
  labels[0][0][0] = -100;
  labels[0][0][1] = (labels[0][0][1] + 1) % 5;
  accuracy.reset();
  accuracy.add(logits, labels);
  with_ignored.add(logits, labels);
  EXPECT_EQ(accuracy.compute(), 22. / 24);
  EXPECT_EQ(with_ignored.compute(), 22. / 23);

  Accuracy of_a_class(torch::kCPU, {.ignore_index = 1});
  EXPECT_TRUE(std::isnan(of_a_class.compute()));
  of_a_class.add(torch::eye(2), torch::tensor({0, 1}));
  EXPECT_EQ(of_a_class.compute(), 1);
  EXPECT_EQ(of_a_class.state_dict().tensor()[1].item<double>(), 1);
  of_a_class.add(torch::zeros({0, 2}), torch::zeros({0}, torch::kLong));
  EXPECT_EQ(of_a_class.state_dict().tensor()[1].item<double>(), 1) << "an empty batch";
}

TEST(Accuracy, SaysWhatItExpects) {
  Accuracy accuracy(torch::kCPU, {.top_k = 3});
  expect_error<UsageError>(
      [&] {
        accuracy.add(torch::ones({4, 5}), torch::ones({5}, torch::kLong));
      },
      "[4, 5]", "[5]", "[N, classes, ...]");
  expect_error<UsageError>([&] { accuracy.add(torch::ones({4}), torch::ones({4}, torch::kLong)); }, "[4]");
  expect_error<UsageError>([&] { accuracy.add(torch::ones({4, 5}), torch::ones({4})); }, "Float", "integers");
  expect_error<UsageError>(
      [&] {
        accuracy.add(torch::ones({4, 2}), torch::ones({4}, torch::kLong));
      },
      "2 classes", "top_k");
  expect_error<UsageError>([] { Accuracy(torch::kCPU, {.top_k = 0}); }, "top_k is 0");
}

TEST(SumMetric, AddsIntegersExactly) {
  const int64_t large = (int64_t{1} << 51) + 1;
  on_every_rank("shm", 3, [&](const ProcessGroup& world) {
    SumMetric counts(2, world.device());
    counts.add(torch::tensor({large, int64_t{1}}));
    counts.add(torch::tensor({1, 0}));
    EXPECT_EQ(counts.compute(world), (std::vector<double>{3. * (large + 1), 3}));
  });
  SumMetric sums(2);
  expect_error<UsageError>([&] { sums.add(torch::ones({3})); }, "[3]", "expected [2]");
  expect_error<UsageError>([] { SumMetric none(0); }, "count is 0");
}

TEST(SumMetric, RefusesTensorsOfAGpuForSumsOnTheCpu) {
  if (!torch::cuda::is_available()) GTEST_SKIP() << "this machine has no GPU";
  SumMetric sums(2);
  expect_error<UsageError>([&] { sums.add(torch::ones({2}, torch::kCUDA)); }, "cuda:0", "cpu", "block");
}

TEST(Metrics, ContinueFromASavedState) {
  MeanMetric saved, loaded;
  saved.add(2, 3);
  loaded.add(100, 1);
  StateTraits<MeanMetric>::load(loaded, StateTraits<MeanMetric>::save(saved));
  loaded.add(6, 1);
  EXPECT_EQ(loaded.compute(), 3);
  EXPECT_EQ(saved.compute(), 2) << "the state is a copy";
  expect_error<UsageError>([&] { loaded.load_state_dict(torch::ones({3})); }, "[3]", "expected [2]");
  expect_error<UsageError>([&] { loaded.load_state_dict(Value("text")); }, "tensor");
}

// --- seeds

TEST(SeedEverything, RepeatsRandomNumbers) {
  for (auto device : devices_under_test()) {
    auto draw = [&] { return torch::rand({8}, device); };
    EXPECT_EQ(seed_everything(5), 5u);
    const auto first = draw();
    const int number = std::rand();
    EXPECT_FALSE(draw().equal(first));
    seed_everything(5);
    EXPECT_TRUE(draw().equal(first));
    EXPECT_EQ(std::rand(), number);
    seed_everything(6);
    EXPECT_FALSE(draw().equal(first));
  }
}

TEST(SeedEverything, GivesEachRankNumbersOfItsOwn) {
  std::set<uint64_t> seeds, low_bits;
  std::mutex mutex;
  for (uint64_t seed : {0, 1, 2, 3})
    on_every_rank("threads", 4, [&](const ProcessGroup& world) {
      const auto mine = seed_everything(seed, world);
      EXPECT_EQ(seed_everything(seed, world), mine);
      EXPECT_EQ(seed_everything(seed, world, {.same_on_all_ranks = true}), seed);
      const std::lock_guard lock(mutex);
      seeds.insert(mine);
      low_bits.insert(mine & 0xffffffff);
    });
  EXPECT_EQ(seeds.size(), 16u) << "a rank repeats the numbers of another rank or seed";
  EXPECT_EQ(low_bits.size(), 16u) << "LibTorch's generator of the CPU uses 32 bits";
  on_every_rank("threads", 2, [](const ProcessGroup& world) {
    const auto first = world.new_group({0});
    if (world.rank() == 1) expect_error<UsageError>([&] { seed_everything(1, first); }, "not in group 'world/1'");
  });
}

// --- printing

TEST(Print, WritesALineOnRank0) {
  testing::internal::CaptureStdout();
  on_every_rank("threads", 3, [](const ProcessGroup& world) {
    if (world.rank() == 0) std::cout << "before ";
    print(world, "epoch ", 3, ", loss ", std::setprecision(3), 0.123456, " on rank ", world.rank());
    world.barrier();
  });
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "before epoch 3, loss 0.123 on rank 0\n");
}

TEST(Print, WritesALineInOnePiece) {
  int sockets[2];  // of datagrams: each holds what one call has written
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_DGRAM, 0, sockets), 0);
  std::cout.flush();
  const int stdout_before = ::dup(STDOUT_FILENO);
  ::dup2(sockets[0], STDOUT_FILENO);
  const std::string word(20000, 'x');
  on_every_rank("threads", 1, [&](const ProcessGroup& world) { print(world, word, 1, word); });
  ::dup2(stdout_before, STDOUT_FILENO);
  std::string received(100000, '\0');
  received.resize(static_cast<size_t>(::recv(sockets[1], received.data(), received.size(), MSG_DONTWAIT)));
  EXPECT_EQ(received, word + "1" + word + "\n");
  for (int descriptor : {sockets[0], sockets[1], stdout_before}) ::close(descriptor);
}

}  // namespace
}  // namespace lockstep
