#include <lockstep/checkpoint_directory.h>

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>
#include <lockstep/optimizer_state.h>
#include <lockstep/run_threads.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "checkpoint/folder.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

class Directory : public testing::Test {
 protected:
  std::string folder() const { return (temporary_.path() / "runs" / "a").string(); }
  std::string file(const std::string& name) const { return folder() + "/" + name; }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder())) names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

  void damage(const std::string& name, int64_t offset) const {
    std::fstream stream(file(name), std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(offset);
    stream.put('!');
    ASSERT_TRUE(stream.good());
  }

  TemporaryFolder temporary_;
};

/// Runs `body` as the only rank.
void alone(const std::function<void(ProcessGroup)>& body) {
  run_threads(1, body);
}

TEST_F(Directory, ResumesWhereItWasSaved) {
  for (int ranks : {1, 3}) {
    const auto name = folder() + std::to_string(ranks);
    run_threads(ranks, [&](ProcessGroup world) {
      torch::nn::Linear model(2, 3);
      for (auto& parameter : model->parameters()) world.broadcast(parameter.detach(), 0);
      int64_t step = 7;
      std::string note = "first";
      double mine = world.rank() + 0.5;
      auto state = TrainingState{}.add("model", model).add("step_count", step).add("note", note).add("arch", "linear");
      state.add_per_rank("mine", mine);
      CheckpointDirectory checkpoints(world, name);
      EXPECT_EQ(checkpoints.resume(state), 0);
      EXPECT_TRUE(checkpoints.save(4, state, {{"loss", 0.25}}));
      const auto saved = model->weight.clone();
      {
        const c10::NoGradGuard no_grad;
        model->weight.zero_();
      }
      step = 0, note = "second", mine = -1;
      EXPECT_EQ(checkpoints.resume(state), 5);
      EXPECT_TRUE(torch::equal(model->weight, saved));
      EXPECT_EQ(step, 7);
      EXPECT_EQ(note, "first");
      EXPECT_EQ(mine, world.rank() + 0.5);
      EXPECT_EQ(checkpoints.numbers(), std::vector<int64_t>{4});
    });
    const auto value = load_checkpoint(name + "/step-00000004.pt");
    EXPECT_EQ(value.at("step"), Value(4));
    EXPECT_EQ(value.at("arch"), Value("linear"));
    EXPECT_EQ(value.at("metrics"), Value::dict({{"loss", 0.25}}));
    EXPECT_EQ(value.at("world_size"), Value(ranks));
    EXPECT_EQ(value.at("mine").size(), static_cast<size_t>(ranks));
  }
}

TEST_F(Directory, NamesTheRankThatSeesAnotherFolderOnce) {
  run_threads(2, [&](ProcessGroup world) {
    const auto own = folder() + std::to_string(world.rank());
    const auto what = error_of<CheckpointError>([&] { CheckpointDirectory checkpoints(world, own); });
    EXPECT_THAT(what, testing::StartsWith(world.rank() == 1 ? "rank 1: does not see the checkpoint folder"
                                                            : "on rank 1: does not see the checkpoint folder"));
  });
}

TEST_F(Directory, KeepsTheLastEveryNthAndTheBest) {
  alone([&](ProcessGroup world) {
    double x = 0;
    auto state = TrainingState{}.add("x", x);
    CheckpointDirectory checkpoints(
        world, folder(),
        {.keep_last = 2, .keep_every = 4, .best = "loss", .best_mode = MetricMode::kMin, .unit = "epoch"});
    const std::vector<double> losses{std::nan(""), 4, 1, 3, 2, 2, 2, 2, 2, 2};
    for (size_t i = 0; i < losses.size(); ++i) {
      x = static_cast<double>(i);
      checkpoints.save(static_cast<int64_t>(i), state, {{"loss", losses[i]}});
    }
    EXPECT_EQ(checkpoints.numbers(), (std::vector<int64_t>{0, 4, 8, 9}));
    EXPECT_EQ(checkpoints.load_best(state), 3);
    EXPECT_EQ(x, 2);
    EXPECT_EQ(checkpoints.resume(state), 10);
    EXPECT_EQ(x, 9);
  });
  // Another run knows the best of this one.
  alone([&](ProcessGroup world) {
    double x = 100;
    auto state = TrainingState{}.add("x", x);
    CheckpointDirectory checkpoints(world, folder(), {.best = "loss", .best_mode = MetricMode::kMin, .unit = "epoch"});
    checkpoints.save(10, state, {{"loss", 1.5}});
    EXPECT_EQ(checkpoints.load_best(state), 3);
    checkpoints.save(11, state, {{"loss", 0.5}});
    EXPECT_EQ(checkpoints.load_best(state), 12);
  });
}

TEST(PlanRemovals, KeepsWhatIsAskedFor) {
  const std::set<int64_t> numbers{0, 10, 20, 25, 30};
  EXPECT_EQ(detail::plan_removals(numbers, 30, 2, 0), (std::vector<int64_t>{0, 10, 20}));
  EXPECT_EQ(detail::plan_removals(numbers, 30, 1, 20), (std::vector<int64_t>{10, 25}));
  EXPECT_EQ(detail::plan_removals(numbers, 30, 0, 0), std::vector<int64_t>{});
  EXPECT_EQ(detail::plan_removals(numbers, 30, 9, 0), std::vector<int64_t>{});
}

TEST(PlanRemovals, KeepsWhatWasSavedBelowHigherNumbers) {
  const std::set<int64_t> numbers{0, 10, 20, 300, 400};
  EXPECT_EQ(detail::plan_removals(numbers, 20, 2, 0), std::vector<int64_t>{0});
  EXPECT_EQ(detail::plan_removals(numbers, 0, 1, 0), std::vector<int64_t>{});
}

TEST_F(Directory, KeepsWhatItHasJustSaved) {
  alone([&](ProcessGroup world) {
    int64_t x = 1;
    const auto state = TrainingState{}.add("x", x);
    {
      CheckpointDirectory earlier(world, folder(), {.keep_last = 1});
      earlier.save(500, state);
    }
    CheckpointDirectory checkpoints(world, folder(), {.keep_last = 1});
    const LogLines log;
    x = 2;
    EXPECT_TRUE(checkpoints.save(7, state));
    EXPECT_TRUE(checkpoints.save(8, state));
    EXPECT_EQ(checkpoints.numbers(), (std::vector<int64_t>{8, 500}));
    EXPECT_THAT(log.lines(), testing::ElementsAre(testing::HasSubstr("resume() loads step-00000500.pt first")));
    EXPECT_EQ(checkpoints.load(500, state), 501);
    EXPECT_EQ(x, 1);
    EXPECT_EQ(checkpoints.load(8, state), 9);
    EXPECT_EQ(x, 2);
    expect_error<CheckpointError>([&] { checkpoints.load(9, state); }, "step-00000009.pt", "no such file",
                                  "load another one");
    expect_error<CheckpointError>([&] { checkpoints.load_best(state); }, "best.pt", "options.best");
  });
}

TEST_F(Directory, LeavesNewPartsAloneIfItIsNotStrict) {
  run_threads(2, [&](ProcessGroup world) {
    int64_t x = 1, y = 5;
    {
      CheckpointDirectory checkpoints(world, folder());
      checkpoints.save(0, TrainingState{}.add("x", x));
    }
    x = 2;
    auto state = TrainingState{}.add("x", x).add("y", y);
    {
      CheckpointDirectory strict(world, folder());
      expect_error<UsageError>([&] { strict.resume(state); }, "loading 'y'", "no key");
    }
    CheckpointDirectory checkpoints(world, folder(), {.strict = false});
    EXPECT_EQ(checkpoints.resume(state), 1);
    EXPECT_EQ(x, 1);
    EXPECT_EQ(y, 5);
  });
}

TEST_F(Directory, LeavesShardsOfOtherUnitsAlone) {
  std::filesystem::create_directories(folder());
  std::ofstream(file("step-eval-00000001.shard-0-of-1-00000000.pt")) << "of unit step-eval";
  alone([&](ProcessGroup world) { CheckpointDirectory checkpoints(world, folder()); });
  EXPECT_EQ(files(), (std::vector<std::string>{".lock", "step-eval-00000001.shard-0-of-1-00000000.pt"}));
}

TEST_F(Directory, NamesThePartThatCannotBeSaved) {
  for (const bool asynchronous : {false, true})
    run_threads(2, [&](ProcessGroup world) {
      CheckpointDirectory checkpoints(world, folder(), {.asynchronous = asynchronous});
      Value wrong = Value::dict({{"mask", torch::eye(3).to_sparse()}});
      expect_error<UsageError>([&] { checkpoints.save(0, TrainingState{}.add("wrong", wrong)); }, "saving 'wrong'",
                               "sparse");
      int64_t x = 1;
      auto state = world.rank() == 0 ? TrainingState{}.add("x", x) : TrainingState{}.add("other", x);
      expect_error<UsageError>([&] { checkpoints.save(0, state); }, "other", "on rank 0");
      EXPECT_TRUE(checkpoints.save(0, TrainingState{}.add("x", x)));
      checkpoints.wait();
    });
}

TEST_F(Directory, SkipsDamagedCheckpointsAndNamesTheRecord) {
  run_threads(2, [&](ProcessGroup world) {
    auto tensor = torch::zeros({1000});
    auto state = TrainingState{}.add("tensor", tensor);
    CheckpointDirectory checkpoints(world, folder());
    for (int64_t number = 0; number < 3; ++number) {
      tensor.fill_(static_cast<double>(number));
      checkpoints.save(number, state);
    }
    world.barrier();
    if (world.rank() == 0) {
      damage("step-00000002.pt", 2000);
      std::filesystem::resize_file(file("step-00000001.pt"), 3000);
      const LogLines log;
      EXPECT_EQ(checkpoints.resume(state), 1);
      EXPECT_THAT(testing::PrintToString(log.lines()),
                  testing::AllOf(testing::HasSubstr("step-00000002.pt"), testing::HasSubstr("data/0"),
                                 testing::HasSubstr("step-00000001.pt")));
    } else {
      EXPECT_EQ(checkpoints.resume(state), 1);
    }
    EXPECT_TRUE(torch::equal(tensor, torch::zeros({1000})));
    world.barrier();
    if (world.rank() == 0) damage("step-00000000.pt", 2000);
    world.barrier();
    expect_error<CheckpointError>([&] { checkpoints.resume(state); }, "3 damaged", "remove them");
  });
}

TEST_F(Directory, RefusesASecondJobAndNamesTheFirst) {
  alone([&](ProcessGroup world) {
    CheckpointDirectory first(world, folder());
    expect_error<UsageError>([&] { CheckpointDirectory(world, folder()); }, "in use by",
                             "process " + std::to_string(::getpid()));
  });
  alone([&](ProcessGroup world) { CheckpointDirectory again(world, folder()); });
}

TEST_F(Directory, DoesNotFollowALinkInPlaceOfItsLock) {
  const auto target = folder() + "-target";
  std::filesystem::create_directories(folder());
  std::ofstream(target) << "precious";
  std::filesystem::create_symlink(target, file(".lock"));
  run_threads(2, [&](ProcessGroup world) {
    expect_error<UsageError>([&] { CheckpointDirectory(world, folder()); }, ".lock", "symbolic link");
  });
  std::string content;
  std::ifstream(target) >> content;
  EXPECT_EQ(content, "precious");
  std::filesystem::remove(target);
}

TEST_F(Directory, DoesNotWaitForAPipeInPlaceOfItsLock) {
  std::filesystem::create_directories(folder());
  ASSERT_EQ(::mkfifo(file(".lock").c_str(), 0666), 0);
  run_threads(2, [&](ProcessGroup world) {
    expect_error<UsageError>([&] { CheckpointDirectory(world, folder()); }, ".lock", "not a regular file");
  });
}

TEST_F(Directory, RemovesWhatDeadJobsHaveLeft) {
  alone([&](ProcessGroup world) {
    int64_t x = 1;
    CheckpointDirectory checkpoints(world, folder());
    checkpoints.save(1, TrainingState{}.add("x", x));
  });
  std::ofstream(file(".unfinished-step-00000002.pt-1-1")) << "half";
  std::ofstream(file("step-00000001.shard-0-of-1-00000000.pt")) << "of no checkpoint";
  std::ofstream(file("notes.txt")) << "mine";
  alone([&](ProcessGroup world) { CheckpointDirectory checkpoints(world, folder()); });
  EXPECT_EQ(files(), (std::vector<std::string>{".lock", "notes.txt", "step-00000001.pt"}));
}

TEST_F(Directory, CopiesTheStateOfAnAsynchronousSave) {
  run_threads(2, [&](ProcessGroup world) {
    auto tensor = torch::full({1 << 20}, 1.0f);
    auto state = TrainingState{}.add("tensor", tensor);
    CheckpointDirectory checkpoints(world, folder(), {.asynchronous = true});
    for (int64_t number = 0; number < 3; ++number) {
      tensor.fill_(static_cast<double>(number));
      EXPECT_TRUE(checkpoints.save(number, state));
      tensor.fill_(-1);  // must not reach the file
    }
    EXPECT_TRUE(checkpoints.wait());
    EXPECT_EQ(checkpoints.numbers().size(), 3u);
    for (int64_t number = 0; number < 3; ++number)
      EXPECT_TRUE(torch::equal(load_checkpoint(checkpoints.path(number)).at("tensor").tensor(),
                               torch::full({1 << 20}, static_cast<float>(number))));
    EXPECT_EQ(checkpoints.resume(state), 3);
  });
}

TEST_F(Directory, ContinuesWithAWarningIfItCannotWrite) {
  for (const bool asynchronous : {false, true}) {
    SCOPED_TRACE(asynchronous);
    const auto name = folder() + std::to_string(asynchronous);
    run_threads(2, [&](ProcessGroup world) {
      int64_t x = 1;
      auto state = TrainingState{}.add("x", x);
      CheckpointDirectory checkpoints(world, name, {.asynchronous = asynchronous});
      EXPECT_TRUE(checkpoints.save(0, state));
      EXPECT_TRUE(checkpoints.wait());
      world.barrier();
      // A folder of the file's name: renaming fails.
      if (world.rank() == 0) std::filesystem::create_directories(checkpoints.path(1) + "/x");
      world.barrier();
      const bool saved = checkpoints.save(1, state);
      EXPECT_EQ(asynchronous ? checkpoints.wait() : saved, false);
      EXPECT_TRUE(checkpoints.wait()) << "reported once";
      EXPECT_THAT(checkpoints.last_error(), testing::HasSubstr("step-00000001.pt")) << "but not forgotten";
      EXPECT_TRUE(checkpoints.save(2, state));
      EXPECT_TRUE(checkpoints.wait());
      EXPECT_EQ(checkpoints.last_error(), "");
      world.barrier();
      EXPECT_EQ(detail::read_folder(name, "step").unfinished.size(), 0u);
      EXPECT_EQ(checkpoints.resume(state), 3);
    });
    alone([&](ProcessGroup world) {
      int64_t x = 1;
      CheckpointDirectory checkpoints(world, name, {.on_error = OnSaveError::kThrow});
      expect_error<CheckpointError>([&] { checkpoints.save(1, TrainingState{}.add("x", x)); }, "step-00000001.pt");
    });
  }
}

TEST_F(Directory, RefusesStatesThatDoNotFitOnAllRanks) {
  run_threads(2, [&](ProcessGroup world) {
    torch::nn::Linear model(2, 3), other(2, 4);
    CheckpointDirectory checkpoints(world, folder());
    checkpoints.save(0, TrainingState{}.add("model", model));
    expect_error<UsageError>([&] { checkpoints.resume(TrainingState{}.add("model", other)); }, "loading 'model'",
                             "weight is [3, 2], expected [4, 2]");
    expect_error<UsageError>([&] { checkpoints.resume(TrainingState{}.add("ema", model)); }, "'ema'", "'model'");
    expect_error<UsageError>([&] { checkpoints.save(1, TrainingState{}.add("metrics", model)); }, "'metrics'");
    int64_t step = 3;
    expect_error<UsageError>([&] { checkpoints.save(1, TrainingState{}.add("step", step)); }, "'step'", "leave it out");
    expect_error<UsageError>([&] { checkpoints.save(-1, TrainingState{}); }, "-1");
    auto broken = world.rank() == 1 ? at::Tensor() : torch::ones({1});
    TrainingState uneven;
    uneven.add_per_rank("x", broken);
    expect_error<UsageError>([&] { checkpoints.save(1, uneven); }, world.rank() == 1 ? "undefined" : "on rank 1");
    EXPECT_EQ(checkpoints.numbers(), std::vector<int64_t>{0});
  });
  EXPECT_THROW(TrainingState{}.add("x", "1").add("x", "2"), UsageError);
}

// --- sharded optimizers

struct ShardedRun {
  explicit ShardedRun(const ProcessGroup& world, bool named = true) {
    torch::manual_seed(5);
    model = torch::nn::Sequential(torch::nn::Linear(70, 50), torch::nn::Linear(50, 30));
    for (const auto& parameter : model->parameters()) world.broadcast(parameter.detach(), 0);  // ranks are threads
    std::vector<std::pair<std::string, at::Tensor>> parameters;
    for (const auto& item : model->named_parameters()) parameters.emplace_back(item.key(), item.value());
    optimizer = named ? std::make_unique<Optimizer>(parameters, world, torch::optim::AdamWOptions(0.01))
                      : std::make_unique<Optimizer>(model->parameters(), world, torch::optim::AdamWOptions(0.01));
  }

  void train(int64_t steps) {
    for (int64_t i = 0; i < steps; ++i, ++step) {
      for (auto& parameter : model->parameters())
        parameter.mutable_grad() = torch::sin(parameter.detach() * 3 + static_cast<double>(step));
      optimizer->step();
    }
  }

  TrainingState state() { return TrainingState{}.add("model", model).add("optimizer", *optimizer).add("at", step); }

  using Optimizer = ZeroRedundancyOptimizer<torch::optim::AdamW>;
  torch::nn::Sequential model{nullptr};
  std::unique_ptr<Optimizer> optimizer;
  int64_t step = 0;
};

TEST_F(Directory, ShardsAreLoadedByAnyNumberOfRanks) {
  Value expected;
  run_threads(3, [&](ProcessGroup world) {
    ShardedRun run(world);
    run.train(4);
    CheckpointDirectory checkpoints(world, folder(), {.asynchronous = true, .sharded = true});
    checkpoints.save(0, run.state());
    checkpoints.wait();
    checkpoints.save(1, run.state());  // the shards of two checkpoints do not mix
    checkpoints.wait();
    const auto whole = run.optimizer->state_dict();
    run.train(3);
    if (world.rank() == 0) expected = Value::dict({{"model", state_dict(*run.model)}, {"optimizer", whole}});
  });
  EXPECT_EQ(files().size(), 9u);
  const auto expected_model = expected.at("model");
  EXPECT_EQ(load_merged_checkpoint(file("step-00000001.pt")).at("optimizer"), expected.at("optimizer"));
  const auto shards = shards_of(load_checkpoint(file("step-00000001.pt")));
  ASSERT_EQ(shards.size(), 3u);
  const auto second = load_checkpoint(file(shards[1].file)).at("optimizer").at("pieces").elements();
  ASSERT_FALSE(second.empty());
  EXPECT_GT(second[0].at("begin").as_int(), 0) << "no parameter is divided: the test proves little";
  for (int ranks : {1, 2, 3, 5}) {
    SCOPED_TRACE(ranks);
    run_threads(ranks, [&](ProcessGroup world) {
      ShardedRun run(world);
      CheckpointDirectory checkpoints(world, folder(), {.sharded = true});
      EXPECT_EQ(checkpoints.resume(run.state()), 2);
      EXPECT_EQ(run.step, 4);
      run.train(3);
      EXPECT_EQ(state_dict(*run.model), expected_model);
    });
  }
  // Into an optimizer without shards.
  alone([&](ProcessGroup world) {
    ShardedRun run(world);
    torch::nn::Sequential model(torch::nn::Linear(70, 50), torch::nn::Linear(50, 30));
    torch::optim::AdamW plain(model->parameters(), torch::optim::AdamWOptions(1));
    CheckpointDirectory checkpoints(world, folder());
    checkpoints.resume(TrainingState{}.add("model", model).add("optimizer", plain));
    EXPECT_EQ(state_dict(plain)["param_groups"][0]["lr"].as_double(), 0.01);
    EXPECT_EQ(state_dict(plain)["state"], expected.at("optimizer").at("state"));
  });
  // Another model is refused by name.
  run_threads(2, [&](ProcessGroup world) {
    auto parameter = torch::ones({3});
    ShardedRun::Optimizer other({parameter}, world, torch::optim::AdamWOptions(1));
    CheckpointDirectory checkpoints(world, folder());
    expect_error<UsageError>([&] { checkpoints.resume(TrainingState{}.add("optimizer", other)); }, "4 parameters",
                             "expected 1");
  });
  // A damaged shard makes the checkpoint damaged, a missing one too.
  std::string shard;
  for (const auto& name : files())
    if (name.starts_with("step-00000001.shard-2")) shard = name;
  damage(shard, 2000);
  run_threads(2, [&](ProcessGroup world) {
    ShardedRun run(world);
    CheckpointDirectory checkpoints(world, folder(), {.sharded = true});
    EXPECT_EQ(checkpoints.resume(run.state()), 1);
  });
  EXPECT_THAT(error_of<CheckpointError>([&] { load_merged_checkpoint(file("step-00000001.pt")); }),
              testing::AllOf(testing::HasSubstr(shard), testing::HasSubstr("damaged")));
  // An intact file of another checkpoint in place of a shard.
  save_checkpoint(file(shard), Value::dict());
  EXPECT_THAT(error_of<CheckpointError>([&] { load_merged_checkpoint(file("step-00000001.pt")); }),
              testing::AllOf(testing::HasSubstr(shard), testing::HasSubstr("of another checkpoint")));
}

TEST_F(Directory, ShardsOfAnotherMemoryLayoutAreRearranged) {
  using Optimizer = ShardedRun::Optimizer;
  const auto weight = [](bool last) {
    auto values = torch::arange(2 * 3 * 4 * 5).view({2, 3, 4, 5}).to(torch::kFloat) / 100;
    return last ? values.contiguous(torch::MemoryFormat::ChannelsLast) : values;
  };
  Value saved;
  run_threads(2, [&](ProcessGroup world) {
    auto parameter = weight(true);
    Optimizer optimizer({parameter}, world, torch::optim::AdamWOptions(0.01));
    parameter.mutable_grad() = torch::sin(weight(true) * 7);
    optimizer.step();
    CheckpointDirectory checkpoints(world, folder(), {.sharded = true});
    checkpoints.save(0, TrainingState{}.add("optimizer", optimizer));
    const auto whole = optimizer.state_dict();
    if (world.rank() == 0) saved = whole.at("state").at(0).at("exp_avg");
  });
  run_threads(3, [&](ProcessGroup world) {
    auto parameter = weight(false);
    Optimizer optimizer({parameter}, world, torch::optim::AdamWOptions(0.01));
    CheckpointDirectory checkpoints(world, folder(), {.sharded = true});
    checkpoints.resume(TrainingState{}.add("optimizer", optimizer));
    const auto whole = optimizer.state_dict();
    if (world.rank() == 0) {
      EXPECT_TRUE(torch::equal(whole.at("state").at(0).at("exp_avg").tensor(), saved.tensor()));
    }
  });
}

TEST_F(Directory, KeepsAllShardsWhileACheckpointCannotBeRead) {
  run_threads(2, [&](ProcessGroup world) {
    ShardedRun run(world);
    run.train(1);
    CheckpointDirectory checkpoints(world, folder(), {.keep_last = 2, .sharded = true});
    for (int64_t number : {0, 1}) checkpoints.save(number, run.state());
    world.barrier();
    if (world.rank() == 0) damage("step-00000001.pt", 100);
    checkpoints.save(2, run.state());
    EXPECT_EQ(files().size(), 1 + 2 + 3 * 2u);
    // When retention has removed the file, its shards and those that stayed follow.
    for (int64_t number : {3, 4}) checkpoints.save(number, run.state());
    EXPECT_EQ(files().size(), 1 + 2 + 2 * 2u);
  });
}

TEST_F(Directory, WithoutShardsHoldsTheWholeStateOfAShardedOptimizer) {
  run_threads(2, [&](ProcessGroup world) {
    ShardedRun run(world, /*named=*/false);
    run.train(2);
    CheckpointDirectory checkpoints(world, folder());
    checkpoints.save(0, run.state());
    ShardedRun other(world, false);
    checkpoints.resume(other.state());
    run.train(3);
    other.train(3);
    EXPECT_EQ(state_dict(*run.model), state_dict(*other.model));
  });
  const auto optimizer = load_checkpoint(file("step-00000000.pt")).at("optimizer");
  EXPECT_EQ(optimizer.at("state").size(), 4u);
  EXPECT_EQ(optimizer.at("state").at(0).at("exp_avg").tensor().sizes(), (std::vector<int64_t>{50, 70}));
}

}  // namespace
}  // namespace lockstep
