#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "training_run_snippets.h"  // namespace training_run_page, extracted from docs/training_run.md

#include "report/records.h"
#include "support/messages.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace training_run_page {
namespace {

using namespace lockstep;

/// Samples of three classes that a linear layer can tell apart.
struct Points {
  torch::optional<size_t> size() const { return 60; }
  torch::data::Example<> get(size_t index) const {
    const auto label = static_cast<int64_t>(index % 3);
    auto data = torch::zeros({3});
    data[label] = 1 + 0.01 * static_cast<double>(index);
    return {data, torch::tensor(label)};
  }
};

/// A folder that all ranks share.
class SharedFolder {
 public:
  explicit SharedFolder(const ProcessGroup& world)
      : world_(world), path_(world.broadcast_object(own_.path().string(), 0).toStringRef()) {}
  ~SharedFolder() { world_.barrier(); }
  const std::string& path() const { return path_; }

 private:
  TemporaryFolder own_;
  ProcessGroup world_;
  std::string path_;
};

void on_two_ranks(const std::function<void(ProcessGroup, const std::string& folder)>& body) {
  on_every_rank("shm", 2, [&](ProcessGroup world) {
    const SharedFolder folder(world);
    body(world, folder.path());
  });
}

TEST(TrainingRunPage, TrainsAndContinues) {
  on_two_ranks([](const ProcessGroup& world, const std::string& folder) {
    torch::manual_seed(1);
    torch::nn::Linear net(3, 3);
    DataLoader<Points> loader(Points(), DistributedSampler(60, world), {.batch_size = 5});
    const auto evaluate = [&] {
      torch::NoGradGuard no_grad;
      return net(torch::eye(3)).argmax(1).eq(torch::arange(3)).to(torch::kDouble).mean().item<double>();
    };
    EXPECT_EQ(train(world, net, loader, folder, 2, evaluate), 0);
    EXPECT_EQ(train(world, net, loader, folder, 8, evaluate), 0);
    if (world.rank() != 0) return;
    const auto epochs = records_of(folder, "epoch");
    ASSERT_EQ(epochs.size(), 8);
    EXPECT_EQ(epochs.back().at("step"), 8 * 6);
    EXPECT_EQ(epochs.back().at("accuracy"), 1);
    EXPECT_LT(epochs.back().at("loss"), 0.5 * epochs.front().at("loss").get<double>());
    for (const char* file : {"metrics.csv", "summary.json", "checkpoints/best.pt", "checkpoints/step-00000048.pt"})
      EXPECT_TRUE(std::filesystem::exists(folder + "/" + file)) << file;
  });
}

TEST(TrainingRunPage, LogsAccumulatesAndShows) {
  on_two_ranks([](const ProcessGroup& world, const std::string& folder) {
    torch::nn::Linear net(3, 3);
    DistributedDataParallel ddp(net, world);
    torch::optim::SGD optimizer(ddp.parameters(), 0.5);
    DataLoader<Points> loader(Points(), DistributedSampler(60, world), {.batch_size = 5});
    auto options = with_early_stopping();
    options.metrics.every = 1;
    TrainingRun run(world, folder, TrainingState{}.add("model", net), options);
    while (run.next_epoch(100)) {
      train_in_groups(run, ddp, optimizer, loader, 4);
      run.step([&] { log_everything(run, torch::tensor(2.0), torch::tensor(1.0 + world.rank()), 10); });
      show(run, torch::rand({2, 1, 4, 4}), net->weight);
      run.log("accuracy", 1.0 / (1 + static_cast<double>(run.epoch() > 3)));
    }
    EXPECT_EQ(run.epoch(), 6) << "the first epoch and five without improvement";
    EXPECT_EQ(run.steps(), 6 * 3) << "two steps of 4 and 2 batches, and one without";
    EXPECT_EQ(run.results().at("gradient_norm"), 2);
    EXPECT_EQ(run.results().at("tokens"), 20);
    EXPECT_EQ(run.results().at("token_loss"), 2);
    {
      torch::NoGradGuard no_grad;
      net->weight.zero_();
    }
    EXPECT_GT(evaluate_best(run, net, [&] { return net->weight.abs().sum().item<double>(); }), 0);
  });
}

TEST(TrainingRunPage, StopsOnNan) {
  on_two_ranks([](const ProcessGroup& world, const std::string& folder) {
    TrainingRun run(world, folder, TrainingState{}, stopping_on_nan());
    run.next_epoch(1);
    expect_error<Error>([&] { run.step([&] { run.log("loss", world.rank() == 1 ? NAN : 1.0); }); },
                        "metric 'loss' in step 1 on rank 1");
  });
}

TEST(TrainingRunPage, LogsWithoutARun) {
  on_two_ranks([](const ProcessGroup& world, const std::string& folder) {
    double value = world.rank();
    log_alone(world, folder, 12, [&] { return torch::tensor(value += 1); });
    if (world.rank() != 0) return;
    const auto records = records_of(folder);
    ASSERT_EQ(records.size(), 4);
    EXPECT_EQ(records[0].at("loss"), 3.5);  // 1 to 5, and 2 to 6
    EXPECT_EQ(records[3].at("loss"), 7);
  });
}

TEST(TrainingRunPage, Rank0ShowsABarForEachEpoch) {
  on_two_ranks([](const ProcessGroup& world, const std::string&) {
    DataLoader<Points> loader(Points(), DistributedSampler(60, world, {.shuffle = false}), {.batch_size = 10});
    testing::internal::CaptureStdout();
    train_with_bars(world, loader, 3, [](const auto& batch) { return batch.data.sum().template item<double>(); });
    const auto printed = testing::internal::GetCapturedStdout();
    if (world.rank() == 0) {
      for (const char* part : {"epoch 1/3", "epoch 3/3", "3/3", "loss ", "samples/s"})
        EXPECT_THAT(printed, testing::HasSubstr(part));
    } else {
      EXPECT_EQ(printed, "");
    }
  });
}

}  // namespace
}  // namespace training_run_page
