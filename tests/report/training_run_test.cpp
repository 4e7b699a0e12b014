#include <unistd.h>

#include <array>
#include <filesystem>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/accumulate.h>
#include <lockstep/checkpoint_file.h>
#include <lockstep/data_loader.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/join.h>
#include <lockstep/run_threads.h>
#include <lockstep/stream_loader.h>
#include <lockstep/training_run.h>

#include "base/text.h"
#include "report/records.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using nlohmann::json;

TrainingRunOptions quiet(TrainingRunOptions options = {}) {
  options.progress.output = ProgressOptions::Output::kOff;
  return options;
}

/// A dataset whose samples are their numbers.
struct Numbers {
  size_t count = 10;
  torch::optional<size_t> size() const { return count; }
  at::Tensor get(size_t index) const { return torch::tensor(static_cast<double>(index), torch::kDouble); }
};

// --- processes that end in the middle

/// What a run leaves behind, except for times.
struct Outcome {
  std::string weights;
  std::vector<json> records;
  bool operator==(const Outcome&) const = default;
};

Outcome outcome_of(const std::string& weights, const std::string& folder) {
  Outcome outcome{weights, records_of(folder)};
  for (auto& record : outcome.records) record.erase("seconds");
  return outcome;
}

constexpr const char* kEpochs = "4";  // of 15 steps on 2 ranks

/// Runs the program to its end.
Outcome run_whole(const std::string& folder, int ranks) {
  JobProcesses job(TEST_RANKS, ranks, {"running_rank", "train", folder, kEpochs, "0"});
  job.start_all();
  const auto weights = job[0].expect_line("weights ");
  for (int rank = 0; rank < ranks; ++rank) EXPECT_EQ(job[rank].wait(), 0) << job[rank].output();
  return outcome_of(weights, folder);
}

TEST(InterruptedRun, HasTheSameBitsAfterSignals) {
  const TemporaryFolder whole, folder;
  const auto expected = run_whole(whole.path(), 2);
  std::mt19937 random(3);
  for (const int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    JobProcesses job(TEST_RANKS, 2, {"running_rank", "train", folder.path(), kEpochs, "0"});
    job.start_all();
    const auto line = job[0].expect_line("step ");
    const auto first = std::stoll(line.substr(5));
    for (uint32_t i = 0; i < random() % 9; ++i) job[0].expect_line("step ");
    job[static_cast<int>(random() % 2)].signal(signal);
    for (int rank : {0, 1}) EXPECT_EQ(job[rank].wait(), 6) << job[rank].output();
    EXPECT_THAT(job[0].output(), testing::HasSubstr("Stopped after step "));
    EXPECT_GE(first, 1);
    EXPECT_FALSE(std::filesystem::exists(folder.path() / "summary.json"));
  }
  EXPECT_EQ(run_whole(folder.path(), 2), expected);
  const auto summary = json::parse(std::ifstream(folder.path() / "summary.json"));
  EXPECT_EQ(summary.at("status"), "complete");
  EXPECT_EQ(summary.at("epochs"), 4);
  EXPECT_EQ(summary.at("steps"), 60);
  EXPECT_EQ(summary.at("samples"), 4 * 120);
}

TEST(InterruptedRun, HasTheSameBitsAfterKills) {
  const TemporaryFolder whole, folder;
  const auto expected = run_whole(whole.path(), 2);
  std::mt19937 random(4);
  for (int i = 0; i < 3; ++i) {
    JobProcesses job(TEST_RANKS, 2, {"running_rank", "train", folder.path(), kEpochs, "4"});
    job.start_all();
    for (uint32_t step = 0; step < 5 + random() % 8; ++step) job[0].expect_line("step ");
    const int killed = static_cast<int>(random() % 2);
    job[killed].signal(SIGKILL);
    EXPECT_EQ(job[killed].wait(), 128 + SIGKILL);
    EXPECT_NE(job[1 - killed].wait(), 0) << job[1 - killed].output();
  }
  JobProcesses job(TEST_RANKS, 2, {"running_rank", "train", folder.path(), kEpochs, "4"});
  job.start_all();
  EXPECT_THAT(job[0].expect_line("Resuming "), testing::HasSubstr("after step "));
  const auto weights = job[0].expect_line("weights ");
  for (int rank : {0, 1}) EXPECT_EQ(job[rank].wait(), 0) << job[rank].output();
  EXPECT_EQ(outcome_of(weights, folder.path()), expected);
}

TEST(InterruptedRun, IsCompleteAfterItsEnd) {
  const TemporaryFolder folder;
  const auto first = run_whole(folder.path(), 1);
  const auto summary = lines_of(folder.path() / "summary.json");
  EXPECT_EQ(run_whole(folder.path(), 1), first);
  EXPECT_EQ(lines_of(folder.path() / "summary.json"), summary);
}

TEST(InterruptedRun, SaysIfItCouldNotSave) {
  const TemporaryFolder folder;
  JobProcesses job(TEST_RANKS, 2, {"running_rank", "train", folder.path(), kEpochs, "0"});
  job.start_all();
  job[0].expect_line("step ");
  // Moved, so that nothing is removed while a rank writes.
  std::filesystem::rename(folder.path() / "checkpoints", folder.path() / "moved");
  job[1].signal(SIGTERM);
  for (int rank : {0, 1}) EXPECT_EQ(job[rank].wait(), 1) << job[rank].output();
  EXPECT_THAT(job[0].output(), testing::HasSubstr("is not on disk: checkpoint step-"));
  EXPECT_THAT(job[0].output(), testing::HasSubstr("there is no checkpoint in"));
  EXPECT_THAT(job[0].output(), testing::Not(testing::HasSubstr("Stopped after step ")));
}

TEST(TrainingRun, OfAProgramWithClosedDescriptorsPrintsIntoNoFile) {
  const TemporaryFolder folder;
  RankProcess shell(
      {"sh", "-c", "exec \"$0\" \"$@\" <&- >&- 2>&-", TEST_RANKS, "running_rank", "train", folder.path(), "1", "0"},
      {{"RANK", ""}, {"WORLD_SIZE", ""}});
  EXPECT_EQ(shell.wait(), 0);
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "summary.json"));
  for (const auto& file : std::filesystem::recursive_directory_iterator(folder.path())) {
    if (!file.is_regular_file()) continue;
    std::ifstream bytes(file.path(), std::ios::binary);
    EXPECT_THAT(std::string(std::istreambuf_iterator<char>(bytes), {}), testing::Not(testing::HasSubstr("step 1\n")))
        << file.path();
  }
}

TEST(TrainingRun, IsNotCompleteWithoutItsLastCheckpoint) {
  for (const bool asynchronous : {false, true}) {
    SCOPED_TRACE(asynchronous);
    const TemporaryFolder folder;
    const auto train = [&](bool is_obstructed) {
      run_threads(2, [&](ProcessGroup world) {
        TrainingRun run(world, folder.path(), TrainingState{}, quiet({.asynchronous = asynchronous}));
        while (run.next_epoch(2)) {
          run.step([] {});
          world.barrier();
          // A folder of the file's name: renaming fails.
          if (is_obstructed && world.rank() == 0 && run.steps() == 2)
            std::filesystem::create_directories(run.checkpoints().path(2) + "/x");
        }
        EXPECT_EQ(run.exit_code(), is_obstructed ? 1 : 0);
      });
      return std::filesystem::exists(folder.path() / "summary.json");
    };
    const LogLines log_lines;
    EXPECT_FALSE(train(true)) << "there is no summary";
    EXPECT_THAT(log_lines.lines(),
                testing::Contains(testing::HasSubstr("the last checkpoint, after step 2, is not on disk")));
    remove_folder(folder.path() / "checkpoints/step-00000002.pt");
    EXPECT_TRUE(train(false));
  }
}

TEST(TrainingRun, HasNoSummaryWhileItIsContinuedWithMoreEpochs) {
  const TemporaryFolder folder;
  const auto summary = folder.path() / "summary.json";
  for (const int epochs : {1, 2})
    run_threads(2, [&](ProcessGroup world) {
      TrainingRun run(world, folder.path(), TrainingState{}, quiet());
      EXPECT_EQ(run.results().contains("loss"), epochs == 2) << "of the epoch before";
      while (run.next_epoch(epochs)) {
        run.step([&] { run.log("loss", 1); });
        world.barrier();
        EXPECT_FALSE(std::filesystem::exists(summary));
      }
      world.barrier();
      EXPECT_TRUE(std::filesystem::exists(summary));
    });
}

// --- positions

TEST(TrainingRun, ContinuesInTheLoopThatWasInterrupted) {
  for (int64_t stop = 0; stop <= 10; ++stop) {
    SCOPED_TRACE(stop);
    const TemporaryFolder folder;
    std::vector<double> whole, parts;
    auto train = [&](std::vector<double>& seen, int64_t until, const std::string& name) {
      run_threads(2, [&](ProcessGroup world) {
        DistributedSampler sampler(12, world, {.seed = 5});
        DataLoader<Numbers> loader(Numbers{12}, sampler, {.batch_size = 2});
        const std::vector<int> others{1, 2, 3};
        int64_t count = 0;
        TrainingRun run(world, (folder.path() / name).string(), TrainingState{}.add("count", count), quiet());
        const auto see = [&](double value) {
          ++count;
          if (world.rank() == 0) seen.push_back(value);
          if (count != until) return false;
          run.save();
          return true;
        };
        while (run.next_epoch(2)) {  // 3 + 3 batches on this rank, with others between them
          for (auto& batch : run.batches(loader)) {
            run.step([&] { run.log("value", batch.sum()); });
            if (see(batch[0].item<double>())) return;
          }
          for (int number : run.batches(others)) {
            run.step([&] { run.log("value", number); });
            if (see(-number)) return;
          }
        }
        EXPECT_EQ(run.epoch(), 2);
        EXPECT_EQ(run.steps(), 12);
      });
    };
    train(whole, -1, "whole");
    train(parts, stop, "parts");
    train(parts, -1, "parts");
    EXPECT_EQ(whole.size(), 12);
    EXPECT_EQ(parts, whole);
    auto records = records_of(folder.path() / "whole"), continued = records_of(folder.path() / "parts");
    for (auto* all : {&records, &continued})
      for (auto& record : *all) record.erase("seconds");
    EXPECT_EQ(continued, records);
  }
}

TEST(TrainingRun, ContinuesWithAnotherNumberOfRanks) {
  const TemporaryFolder folder;
  std::mutex mutex;
  std::vector<int64_t> seen(24);
  for (const auto& [ranks, steps] : {std::pair(3, 2), std::pair(2, 2), std::pair(1, 100)}) {
    run_threads(ranks, [&](ProcessGroup world) {
      DistributedSampler sampler(24, world, {.seed = 5});
      DataLoader<Numbers> loader(Numbers{24}, sampler, {.batch_size = 2});
      TrainingRun run(world, folder.path(), TrainingState{}, quiet());
      int64_t left = steps;
      while (run.next_epoch(1)) {
        for (auto& batch : run.batches(loader)) {
          run.step([&] { run.log("number", batch.mean()); });
          const std::lock_guard lock(mutex);
          for (int64_t i = 0; i < batch.size(0); ++i) ++seen[static_cast<size_t>(batch[i].item<double>())];
          if (--left == 0) break;
        }
        if (left == 0) {
          run.save();
          return;
        }
      }
      EXPECT_NEAR(run.results().at("number"), 11.5, 1e-12) << "the mean of all samples, by whatever rank";
    });
  }
  EXPECT_THAT(seen, testing::Each(1));
}

/// The numbers below 24, dealt to the parts, with a random number of the part and the epoch for each.
struct NumberStream {
  explicit NumberStream(const StreamPart& part) : draw(part.seed), number(part.index), step(part.count) {}
  std::optional<at::Tensor> next() {
    if (number >= 24) return std::nullopt;
    const auto sample = torch::tensor(
        {static_cast<double>(std::exchange(number, number + step)), static_cast<double>(draw() >> 12)}, torch::kDouble);
    return sample;
  }
  std::mt19937_64 draw;
  int64_t number, step;
};

TEST(TrainingRun, ContinuesInAStream) {
  constexpr int kRanks = 2;
  const auto open = [](const StreamPart& part) { return NumberStream(part); };
  using Seen = std::array<std::vector<std::pair<double, double>>, kRanks>;
  for (int64_t stop = 0; stop <= 10; ++stop) {
    SCOPED_TRACE(stop);
    const TemporaryFolder folder;
    Seen whole, parts;
    auto train = [&](Seen& seen, int64_t until, const std::string& name) {
      run_threads(kRanks, [&](ProcessGroup world) {
        StreamLoader loader(open, world, {.batch_size = 3, .num_workers = 2, .seed = 5});
        TrainingRun run(world, (folder.path() / name).string(), TrainingState{}, quiet());
        while (run.next_epoch(2)) {  // 4 steps
          for (auto& batch : run.batches(loader)) {
            run.step([&] { run.log("value", batch.sum()); });
            for (int64_t i = 0; i < batch.size(0); ++i)
              seen.at(static_cast<size_t>(world.rank()))
                  .emplace_back(batch[i][0].item<double>(), batch[i][1].item<double>());
            if (run.steps() != until) continue;
            run.save();
            return;
          }
          EXPECT_EQ(loader.next_epoch(), run.epoch() + 1);
        }
        EXPECT_EQ(run.epoch(), 2);
        EXPECT_EQ(run.steps(), 8);
      });
    };
    train(whole, -1, "whole");
    train(parts, stop, "parts");
    train(parts, -1, "parts");
    EXPECT_EQ(whole[0].size() + whole[1].size(), 2 * 24u);
    EXPECT_EQ(parts, whole);
  }
}

TEST(TrainingRun, ContinuesInAStreamWithAnotherNumberOfRanks) {
  const TemporaryFolder folder;
  std::mutex mutex;
  std::vector<int64_t> seen(24);
  for (const auto& [ranks, steps] : {std::pair(3, 2), std::pair(2, 2), std::pair(1, 100)}) {
    run_threads(ranks, [&, steps = steps](ProcessGroup world) {
      StreamLoader loader([](const StreamPart& part) { return NumberStream(part); }, world,
                          {.batch_size = 2, .parts = 6});
      TrainingRun run(world, folder.path(), TrainingState{}, quiet());
      int64_t left = steps;
      while (run.next_epoch(1)) {
        for (auto& batch : run.batches(loader)) {
          run.step([&] { run.log("number", batch.select(1, 0).mean()); });
          const std::lock_guard lock(mutex);
          for (int64_t i = 0; i < batch.size(0); ++i) ++seen.at(static_cast<size_t>(batch[i][0].item<double>()));
          if (--left == 0) break;
        }
        if (left == 0) {
          run.save();
          return;
        }
      }
      EXPECT_NEAR(run.results().at("number"), 11.5, 1e-12) << "the mean of all samples, by whatever rank";
    });
  }
  EXPECT_THAT(seen, testing::Each(1));
}

TEST(TrainingRun, RefusesRanksWithDifferentNumbersOfBatchesAtOnce) {
  const TemporaryFolder folder;
  run_threads(3, [&](ProcessGroup world) {
    DistributedSampler sampler(10, world, {.tail = Tail::kExact});  // 4, 3 and 3 samples
    DataLoader<Numbers> unequal(Numbers{10}, sampler, {.batch_size = 3}),
        equal(Numbers{10}, sampler, {.batch_size = 4});
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    while (run.next_epoch(1)) {
      expect_error<UsageError>([&] { run.batches(unequal).begin(); }, text("rank ", world.rank(), ": "), "2, 1, 1",
                               "Tail::kPad", "Tail::kDrop", "join()");
      for ([[maybe_unused]] auto& batch : run.batches(equal)) run.step([] {});
      const std::vector<int> ranges(2 + static_cast<size_t>(world.rank() == 2));
      expect_error<UsageError>([&] { run.batches(ranges).begin(); }, "2, 2, 3");
    }
    EXPECT_EQ(run.steps(), 1);
  });
}

TEST(TrainingRun, BatchesMayDifferInAJoin) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    DistributedDataParallel ddp(model, world);
    const std::vector<int> mine(1 + static_cast<size_t>(world.rank()));
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    while (run.next_epoch(1))
      run.step([&] {
        ddp.join([&] {
          for ([[maybe_unused]] int number : run.batches(mine)) ddp(torch::ones({1, 1})).mean().backward();
        });
      });
    EXPECT_EQ(run.steps(), 1);
  });
}

TEST(TrainingRun, ContinuesWithDataOfEachRankOfItsOwn) {
  const TemporaryFolder folder;
  std::mutex mutex;
  const auto train = [&](const std::string& name, int64_t until) {
    std::vector<std::vector<double>> seen(2);
    run_threads(2, [&](ProcessGroup world) {
      const size_t samples = world.rank() == 0 ? 6 : 5;
      DataLoader<Numbers> loader(Numbers{samples}, {.batch_size = 2, .shuffle = true, .seed = 3});
      TrainingRun run(world, (folder.path() / name).string(), TrainingState{}, quiet());
      while (run.next_epoch(2))
        for (auto& batch : run.batches(loader)) {
          run.step([] {});
          {
            const std::lock_guard lock(mutex);
            for (int64_t i = 0; i < batch.size(0); ++i)
              seen[static_cast<size_t>(world.rank())].push_back(batch[i].item<double>());
          }
          if (run.steps() != until) continue;
          run.save();
          return;
        }
    });
    return seen;
  };
  const auto whole = train("whole", -1);
  EXPECT_EQ(whole[0].size(), 12);
  EXPECT_EQ(whole[1].size(), 10);
  EXPECT_NE(std::vector(whole[0].begin(), whole[0].begin() + 6), std::vector(whole[0].begin() + 6, whole[0].end()));
  auto parts = train("parts", 2);
  const auto rest = train("parts", -1);
  for (const size_t rank : {0, 1}) {
    parts[rank].insert(parts[rank].end(), rest[rank].begin(), rest[rank].end());
    EXPECT_EQ(parts[rank], whole[rank]) << "rank " << rank;
  }
}

// --- metrics

TEST(TrainingRun, WeighsValuesBySamples) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    DistributedSampler sampler(11, world, {.shuffle = false, .tail = Tail::kExact});
    DataLoader<Numbers> loader(Numbers{11}, sampler, {.batch_size = 4});  // batches of 4 and 2, or 4 and 1
    torch::optim::SGD optimizer({torch::ones({1}).requires_grad_()}, 0.25);
    TrainingRun run(world, folder.path(), TrainingState{}, quiet({.metrics = {.every = 1}, .optimizer = &optimizer}));
    while (run.next_epoch(1)) {
      for (auto& batch : run.batches(loader))
        run.step([&] {
          run.log("mean", batch.mean());
          run.log("unweighted", batch.mean(), 1);
          run.log("most", batch.max(), MetricReduction::kMax);
        });
      run.log("ranks", world.rank());
    }
    const auto& results = run.results();
    EXPECT_NEAR(results.at("mean"), 5, 1e-12);
    EXPECT_EQ(results.at("most"), 10);
    EXPECT_EQ(results.at("ranks"), 0.5);
    // Rank 0 has 0, 2, 4, 6 and 8, 10; rank 1 has 1, 3, 5, 7 and 9.
    EXPECT_NEAR(results.at("unweighted"), (3 + 9 + 4 + 9) / 4.0, 1e-12);
    EXPECT_FALSE(results.contains("lr")) << "it is of steps";
  });
  for (const auto& record : records_of(folder.path(), "step")) EXPECT_EQ(record.at("lr"), 0.25);
}

TEST(TrainingRun, AccumulatesGradientsOfSeveralBatches) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
    model->to(torch::kDouble);
    {
      torch::NoGradGuard no_grad;
      model->weight.fill_(1);
    }
    DistributedDataParallel ddp(model, world);
    DistributedSampler sampler(14, world, {.shuffle = false});
    DataLoader<Numbers> loader(Numbers{14}, sampler, {.batch_size = 2});
    TrainingRun run(world, folder.path(), TrainingState{}, quiet({.metrics = {.every = 1}}));
    std::vector<double> gradients;
    while (run.next_epoch(1))
      for (auto& group : in_groups(run.batches(loader), 3))  // 3 batches, and then 1 with a single sample
        run.step([&] {
          model->zero_grad();
          auto loss = accumulate(ddp, group, [&](at::Tensor& batch) { return ddp(batch.unsqueeze(1)).mean(); });
          run.log("loss", loss);
          gradients.push_back(model->weight.grad().item<double>());
        });
    EXPECT_EQ(run.steps(), 2);
    EXPECT_EQ(gradients.size(), 2);
    EXPECT_NEAR(gradients[0], 5.5, 1e-12);  // samples 0 to 11
    EXPECT_NEAR(gradients[1], 12.5, 1e-12);
    EXPECT_NEAR(run.results().at("loss"), 6.5, 1e-12) << "over all samples";
  });
}

TEST(TrainingRun, DropsWhatAStepThatThrowsHasLogged) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    while (run.next_epoch(1)) {
      EXPECT_THROW(run.step([&] {
        run.log("loss", 100);
        throw std::runtime_error("no luck");
      }),
                   std::runtime_error);
      EXPECT_EQ(run.step([&] {
        run.log("loss", 1);
        return 7;
      }),
                7);
    }
    EXPECT_EQ(run.steps(), 1);
    EXPECT_EQ(run.results().at("loss"), 1);
  });
}

TEST(TrainingRun, AStepThatIsRepeatedHasTheSamplesOfItsBatches) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    DistributedSampler sampler(16, world, {.shuffle = false});
    DataLoader<Numbers> loader(Numbers{16}, sampler, {.batch_size = 3});  // batches of 3, 3 and 2
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    while (run.next_epoch(1))
      for (int number = 0; auto& batch : run.batches(loader)) {
        ++number;
        const auto fail = [] { throw std::runtime_error("no luck"); };
        if (number < 3) {
          EXPECT_THROW(run.step(fail), std::runtime_error);
        }
        if (number != 2) run.step([&] { run.log("mean", batch.mean()); });  // the second batch is given up
      }
    // Of rank 0: 0, 2, 4 and 12, 14. Of rank 1: 1, 3, 5 and 13, 15.
    EXPECT_NEAR(run.results().at("mean"), (3 * 2 + 2 * 13 + 3 * 3 + 2 * 14) / 10.0, 1e-12);
  });
}

// --- join

/// Makes `batches` iterations of a join with a model of one weight. Collective.
void train_in_join(const ProcessGroup& world, int batches, const JoinOptions& options,
                   const std::function<void(const std::function<void()>& train)>& iteration) {
  torch::nn::Linear model(torch::nn::LinearOptions(1, 1).bias(false));
  DistributedDataParallel ddp(model, world);
  ddp.join(
      [&] {
        for (int i = 0; i < batches; ++i) iteration([&] { ddp(torch::ones({1, 1})).mean().backward(); });
      },
      options);
}

TEST(TrainingRun, RefusesCallsInAJoinWhereRanksTakeDifferentNumbersOfSteps) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    run.next_epoch(1);
    train_in_join(world, 1 + world.rank(), {}, [&](const std::function<void()>& train) {
      expect_error<UsageError>([&] { run.step(train); }, text("rank ", world.rank(), ": "),
                               "step() is called inside of join()", "Tail::kPad", "throw_on_early_termination",
                               "join() inside of step()");
      expect_error<UsageError>([&] { run.next_epoch(1); }, "next_epoch() is called inside of join()");
      expect_error<UsageError>([&] { run.save(); }, "save() is called inside of join()");
      expect_error<UsageError>([&] { TrainingRun(world, folder.path(), TrainingState{}, quiet()); },
                               "constructor is called inside of join()");
      train();
    });
    run.step([] {});  // after the join
    EXPECT_FALSE(run.next_epoch(1));
    EXPECT_EQ(run.steps(), 1);
  });
}

TEST(TrainingRun, RefusesAJoinThatEndsTogetherOnSomeOfItsRanksOnly) {
  const TemporaryFolder folder;
  run_threads(4, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    run.next_epoch(1);
    const auto half = world.split_group(world.rank() / 2);
    const JoinOptions together{.throw_on_early_termination = true};
    train_in_join(half, 1 + world.rank() / 2, together, [&](const std::function<void()>& train) {
      expect_error<UsageError>([&] { run.step(train); }, "step() is called inside of join()");
      train();
    });
    EXPECT_EQ(run.steps(), 0);
  });
}

TEST(TrainingRun, AStepMayHoldAWholeJoin) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    while (run.next_epoch(1))
      run.step([&] {
        int64_t number = 0;
        train_in_join(world, 1 + world.rank(), {}, [&](const std::function<void()>& train) {
          train();
          run.log("number", ++number, 2 + world.rank());
        });
      });
    EXPECT_EQ(run.steps(), 1);
    EXPECT_NEAR(run.results().at("number"), (2 * 1 + 3 * 1 + 3 * 2) / 8.0, 1e-12);
  });
}

TEST(TrainingRun, StepsInAJoinThatEndsOnAllRanksTogether) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    while (run.next_epoch(1))
      EXPECT_THROW(train_in_join(world, 3 + 2 * world.rank(), {.throw_on_early_termination = true},
                                 [&](const std::function<void()>& train) {
                                   run.step([&] {
                                     train();
                                     run.log("rank", world.rank());
                                   });
                                 }),
                   InputsExhausted);
    EXPECT_EQ(run.steps(), 3);
    EXPECT_EQ(run.results().at("rank"), 0.5);
  });
}

// --- values that are not finite

TEST(TrainingRun, StopsAllRanksAtAValueThatIsNotFinite) {
  for (const double value : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
    for (const int64_t every : {1, 4, 0}) {
      SCOPED_TRACE(testing::Message() << value << " with a record for every " << every << " steps");
      const TemporaryFolder folder;
      const LogLines log;
      run_threads(3, [&](ProcessGroup world) {
        TrainingRun run(world, folder.path(), TrainingState{},
                        quiet({.save_every_steps = 1, .stop_on_nan = true, .metrics = {.every = every}}));
        run.next_epoch(1);
        const auto step = [&] {
          run.step([&] {
            run.log("loss", run.steps() == 4 && world.rank() == 1 ? value : 1);
            run.log("empty", NAN, 0);
          });
        };
        for (int i = 0; i < 4; ++i) step();
        expect_error<Error>(step, text("rank ", world.rank(), ": "), "metric 'loss' in step 5 on rank 1", "stop_on_nan",
                            "learning rate");
        world.barrier();  // the group still works
        expect_error<Error>(step, "metric 'loss' in step 5 on rank 1");
        expect_error<Error>([&] { run.next_epoch(1); }, "metric 'loss' in step 5 on rank 1");
        if (world.rank() == 0) {
          EXPECT_EQ(run.checkpoints().numbers(), (std::vector<int64_t>{2, 3, 4})) << "of the steps before";
        }
      });
    }
  }
}

TEST(TrainingRun, StopsAtTheEndOfAnEpochWithAValueThatIsNotFinite) {
  const TemporaryFolder folder;
  const LogLines log;
  run_threads(2, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet({.stop_on_nan = true}));
    run.next_epoch(2);
    run.step([] {});
    run.log("accuracy", NAN);
    expect_error<Error>([&] { run.next_epoch(2); }, "metric 'accuracy' in epoch 1 on all 2 ranks", "stop_on_nan");
    EXPECT_TRUE(run.checkpoints().numbers().empty());
  });
}

TEST(TrainingRun, WarnsAboutValuesThatAreNotFiniteAndTrainsOn) {
  const TemporaryFolder folder;
  const LogLines log;
  run_threads(2, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet());
    while (run.next_epoch(2))
      for (int i = 0; i < 15; ++i) run.step([&] { run.log("loss", run.steps() >= 12 && world.rank() == 1 ? NAN : 1); });
    EXPECT_EQ(run.exit_code(), 0);
    EXPECT_EQ(run.steps(), 30);
  });
  EXPECT_THAT(log.lines(), testing::ElementsAre(
                               testing::AllOf(testing::HasSubstr("metric 'loss' in steps 11 to 15 on rank 1"),
                                              testing::HasSubstr("stop_on_nan"), testing::HasSubstr("learning rate"))));
}

// --- checkpoints, early stopping

TEST(TrainingRun, KeepsTheBestEpochAndStopsWithoutImprovement) {
  const TemporaryFolder folder;
  const std::vector<double> accuracies{0.5, 0.7, 0.6, 0.7, 0.65, 0.9};
  auto train = [&] {
    int64_t epochs = 0;
    run_threads(2, [&](ProcessGroup world) {
      int64_t marker = -1;
      TrainingRun run(world, folder.path(), TrainingState{}.add("marker", marker),
                      quiet({.best = "accuracy", .early_stopping = EarlyStoppingOptions{.metric = "accuracy"}}));
      while (run.next_epoch(6)) {
        marker = run.epoch();
        run.step([] {});
        run.log("accuracy", accuracies[static_cast<size_t>(run.epoch())]);
        if (world.rank() == 0) ++epochs;
      }
      EXPECT_EQ(run.exit_code(), 0);
    });
    return epochs;
  };
  EXPECT_EQ(train(), 5);
  EXPECT_EQ(load_checkpoint(folder.path() / "checkpoints" / "best.pt").at("marker").as_int(), 1);
  EXPECT_EQ(json::parse(std::ifstream(folder.path() / "summary.json")).at("status"), "stopped early");
  EXPECT_EQ(train(), 0) << "it stays stopped";
}

TEST(TrainingRun, RefusesABestMetricThatIsNotLogged) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    const auto run_epoch = [&](TrainingRunOptions options, int64_t epochs, const std::string& name, bool logs) {
      TrainingRun run(world, (folder.path() / name).string(), TrainingState{}, quiet(std::move(options)));
      run.next_epoch(epochs);
      if (logs) {
        run.step([&] { run.log("loss", 1); });
        run.log("accuracy", 0.5);
      }
      run.next_epoch(epochs);
    };
    expect_error<UsageError>([&] { run_epoch({.best = "acuracy"}, 2, "a", true); }, text("rank ", world.rank(), ": "),
                             "best is the metric 'acuracy'", "not logged", "accuracy and loss");
    expect_error<UsageError>([&] { run_epoch({.best = "accuracy"}, 2, "b", false); }, "best is the metric 'accuracy'",
                             "no metric was");
    expect_error<UsageError>([&] { run_epoch({.best = "acuracy", .save_every_epochs = 5}, 1, "c", true); },
                             "'acuracy'");
    run_epoch({.best = "acuracy", .save_every_epochs = 5}, 2, "d", true);  // no checkpoint is saved
    expect_error<UsageError>(
        [&] { run_epoch({.early_stopping = EarlyStoppingOptions{.metric = "acuracy"}}, 2, "e", true); },
        "early_stopping watches the metric 'acuracy'", "not logged", "accuracy and loss");
  });
}

TEST(TrainingRun, SavesTheEpochBeforeItRefusesItsMetrics) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    for (const std::string best : {"acuracy", "accuracy"}) {
      TrainingRun run(world, folder.path(), TrainingState{}, quiet({.best = best, .save_every_epochs = 3}));
      run.next_epoch(4);
      EXPECT_EQ(run.epoch(), best == "accuracy" ? 3 : 0) << "the corrected program continues";
      for (int i = run.epoch(); i < 4; ++i) {
        run.step([] {});
        run.log("accuracy", 0.5);
        if (i == 2) {
          expect_error<UsageError>([&] { run.next_epoch(4); }, "'acuracy'");
          break;
        }
        EXPECT_EQ(run.next_epoch(4), i < 3);
      }
    }
  });
  EXPECT_TRUE(std::filesystem::exists(folder.path() / "checkpoints/best.pt"));
}

TEST(TrainingRun, SavesTheEpochBeforeItRefusesTheMetricOfEarlyStopping) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{},
                    quiet({.save_every_epochs = 0, .early_stopping = EarlyStoppingOptions{.metric = "acuracy"}}));
    run.next_epoch(2);
    run.step([&] { run.log("loss", 1); });
    expect_error<UsageError>([&] { run.next_epoch(2); }, "'acuracy'");
    EXPECT_EQ(run.checkpoints().numbers(), (std::vector<int64_t>{1}));
  });
}

TEST(TrainingRun, WarnsIfNoEpochWasTheBest) {
  const TemporaryFolder folder;
  for (const double last : {double{NAN}, 0.5}) {
    const LogLines log;
    run_threads(2, [&](ProcessGroup world) {
      TrainingRun run(world, (folder.path() / text(last)).string(), TrainingState{}, quiet({.best = "accuracy"}));
      while (run.next_epoch(2)) {
        run.step([] {});
        run.log("accuracy", run.epoch() == 0 ? NAN : last);
      }
      EXPECT_EQ(run.exit_code(), 0);
    });
    const auto not_finite = testing::HasSubstr("metric 'accuracy' in epoch 1 on all 2 ranks");
    const auto none = testing::AllOf(testing::HasSubstr("has no best.pt"), testing::HasSubstr("'accuracy'"),
                                     testing::HasSubstr("NaN"));
    if (std::isnan(last))
      EXPECT_THAT(log.lines(), testing::ElementsAre(not_finite, none));
    else
      EXPECT_THAT(log.lines(), testing::ElementsAre(not_finite));
  }
}

TEST(EarlyStopping, CountsValuesWithoutImprovement) {
  EarlyStopping stopping({.mode = MetricMode::kMin, .patience = 2, .min_delta = 0.1});
  EXPECT_FALSE(stopping.update(NAN));
  EXPECT_FALSE(stopping.update(1));
  EXPECT_FALSE(stopping.update(0.95));
  EXPECT_FALSE(stopping.update(0.8));
  EXPECT_FALSE(stopping.update(NAN));
  EarlyStopping copy({.mode = MetricMode::kMin, .patience = 2, .min_delta = 0.1});
  copy.load_state_dict(stopping.state_dict());
  EXPECT_EQ(copy.best(), 0.8);
  EXPECT_TRUE(copy.update(0.75));
  expect_error<UsageError>([] { EarlyStopping({.patience = 0}); }, "patience is 0");
  expect_error<UsageError>([] { EarlyStopping({.min_delta = -1}); }, "min_delta is -1");
}

TEST(TrainingRun, SavesAsOftenAsItIsAsked) {
  auto numbers = [](const TrainingRunOptions& options, int64_t steps) {
    const TemporaryFolder folder;
    std::vector<int64_t> result;
    run_threads(2, [&](ProcessGroup world) {
      TrainingRun run(world, folder.path(), TrainingState{}, quiet(options));
      while (run.next_epoch(3))
        for (int64_t i = 0; i < steps; ++i) run.step([] {});
      if (world.rank() == 0) result = run.checkpoints().numbers();
    });
    return result;
  };
  using Numbers = std::vector<int64_t>;
  EXPECT_EQ(numbers({.keep_last = 0}, 5), (Numbers{5, 10, 15}));
  EXPECT_EQ(numbers({}, 5), (Numbers{5, 10, 15}));
  EXPECT_EQ(numbers({.keep_last = 1}, 5), (Numbers{15}));
  EXPECT_EQ(numbers({.keep_last = 0, .save_every_epochs = 2}, 5), (Numbers{10, 15}));
  EXPECT_EQ(numbers({.keep_last = 0, .save_every_epochs = 0}, 5), (Numbers{15}));
  EXPECT_EQ(numbers({.keep_last = 0, .save_every_epochs = 0, .save_every_steps = 4}, 5), (Numbers{4, 8, 12, 15}));
}

TEST(TrainingRun, RefusesMisuse) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    {
      TrainingRun run(world, folder.path(), TrainingState{}, quiet());
      const std::vector<int> numbers{1};
      expect_error<UsageError>([&] { run.step([] {}); }, "outside of an epoch", "next_epoch");
      expect_error<UsageError>([&] { run.batches(numbers).begin(); }, "outside of an epoch", "next_epoch");
      while (run.next_epoch(1))
        run.step([&] {
          expect_error<UsageError>([&] { run.step([] {}); }, "inside of step");
          expect_error<UsageError>([&] { run.next_epoch(1); }, "inside of step");
        });
    }
    expect_error<UsageError>([&] { TrainingRun(world, folder.path(), TrainingState{}, quiet({.resume = false})); },
                             "has checkpoints of an earlier run", "another folder");
    TrainingRun run(world, (folder.path() / "other").string(), TrainingState{},
                    quiet({.early_stopping = EarlyStoppingOptions{.metric = "accuracy"}}));
    run.next_epoch(2);
    expect_error<UsageError>([&] { run.next_epoch(2); }, "'accuracy'", "not logged");
  });
}

}  // namespace
}  // namespace lockstep
