#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/error.h>
#include <lockstep/metric_log.h>
#include <lockstep/run_threads.h>

#include "report/records.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using nlohmann::json;

/// The value that a rank logs in a step. Its weight is different in every step and on every rank.
double value_of(int64_t step, int rank) {
  return std::sin(static_cast<double>(step * 7 + rank * 3 + 1));
}
double weight_of(int64_t step, int rank) {
  return static_cast<double>(1 + (step + 2 * rank) % 5);
}

void log_all(MetricLog& log, int64_t step, int rank) {
  log.log("mean", torch::tensor(value_of(step, rank), torch::kDouble), {.weight = weight_of(step, rank)});
  log.log("sum", value_of(step, rank), {.reduce = MetricReduction::kSum});
  log.log("min", value_of(step, rank), {.reduce = MetricReduction::kMin});
  log.log("max", torch::tensor({value_of(step, rank)}, torch::kDouble), {.reduce = MetricReduction::kMax});
  log.log("last", value_of(step, rank), {.reduce = MetricReduction::kLast});
}

/// What a record over the steps from `first` to `last` has to contain, computed in one pass.
void expect_record(const json& record, int64_t first, int64_t last, int ranks) {
  double sum = 0, weighted = 0, weights = 0, least = INFINITY, most = -INFINITY;
  for (int64_t step = first; step <= last; ++step)
    for (int rank = 0; rank < ranks; ++rank) {
      const double value = value_of(step, rank);
      sum += value;
      weighted += value * weight_of(step, rank);
      weights += weight_of(step, rank);
      least = std::min(least, value);
      most = std::max(most, value);
    }
  EXPECT_EQ(record.at("step"), last);
  EXPECT_NEAR(record.at("mean"), weighted / weights, 1e-12);
  EXPECT_NEAR(record.at("sum"), sum, 1e-12);
  EXPECT_EQ(record.at("min"), least);
  EXPECT_EQ(record.at("max"), most);
  EXPECT_EQ(record.at("last"), value_of(last, 0));
}

TEST(MetricLog, ReducesOverStepsAndRanks) {
  const TemporaryFolder folder;
  run_threads(3, [&](ProcessGroup world) {
    MetricLog log(world, folder.path(), {.every = 4});
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (int64_t i = 1; i <= 10; ++i) {
        log_all(log, log.steps() + 1, world.rank());
        log.end_step(static_cast<double>(epoch) + static_cast<double>(i) / 10);
        if (i % 3 == 0) log.flush();
      }
      log.log_epoch("accuracy", world.rank() + 1.0, {.weight = static_cast<double>(world.rank())});
      const auto results = log.end_epoch();
      EXPECT_NEAR(results.at("accuracy"), (0 * 1 + 1 * 2 + 2 * 3) / 3.0, 1e-15);
    }
  });
  const auto steps = records_of(folder.path(), "step"), epochs = records_of(folder.path(), "epoch");
  ASSERT_EQ(steps.size(), 6);
  int64_t first = 1;
  for (size_t i = 0; i < steps.size(); ++i) {
    const int64_t last = std::vector<int64_t>{4, 8, 10, 14, 18, 20}[i];
    expect_record(steps[i], first, last, 3);
    EXPECT_NEAR(steps[i].at("epoch"), static_cast<double>(last) / 10, 1e-6);
    EXPECT_FALSE(steps[i].contains("accuracy"));
    first = last + 1;
  }
  ASSERT_EQ(epochs.size(), 2);
  expect_record(epochs[0], 1, 10, 3);
  expect_record(epochs[1], 11, 20, 3);
  EXPECT_EQ(epochs[1].at("epoch"), 2);
  EXPECT_EQ(epochs[1].at("accuracy"), (0 * 1 + 1 * 2 + 2 * 3) / 3.0);
}

TEST(MetricLog, RanksMayLogDifferentMetrics) {
  const TemporaryFolder folder;
  run_threads(3, [&](ProcessGroup world) {
    MetricLog log(world, folder.path(), {.every = 1});
    for (int64_t step = 1; step <= 4; ++step) {
      if (world.rank() > 0) log.log("by rank " + std::to_string(world.rank()), static_cast<double>(step));
      if (world.rank() > 0) log.log("late", world.rank() * 10.0 + step, {.reduce = MetricReduction::kLast});
      if (world.rank() == step % 3) log.log("turns", step * 1.0);
      log.end_step();
    }
    const auto results = log.end_epoch();
    EXPECT_EQ(results.at("by rank 2"), 2.5);
    EXPECT_EQ(results.at("turns"), 2.5);
  });
  const auto records = records_of(folder.path(), "step");
  ASSERT_EQ(records.size(), 4);
  EXPECT_EQ(records[2].at("by rank 1"), 3);
  EXPECT_EQ(records[2].at("late"), 13) << "of the lowest rank that has logged one";
  EXPECT_EQ(records[2].at("turns"), 3);
}

TEST(MetricLog, WritesValuesThatAreNotFiniteAsNull) {
  const TemporaryFolder folder;
  const LogLines log_lines;
  run_threads(2, [&](ProcessGroup world) {
    MetricLog log(world, folder.path(), {.every = 1});
    log.log("nan", world.rank() == 0 ? NAN : 1.0);
    log.log("infinite", INFINITY);
    log.log("least", world.rank() == 0 ? NAN : 1.0, {.reduce = MetricReduction::kMin});
    log.log("empty", NAN, {.weight = 0});
    log.log("mostly empty", world.rank() == 0 ? NAN : 3.0, {.weight = world.rank() * 1.0});
    log.end_step();
    const auto results = log.end_epoch();
    EXPECT_TRUE(std::isnan(results.at("nan")));
    EXPECT_EQ(results.at("infinite"), INFINITY);
    EXPECT_EQ(results.at("mostly empty"), 3);
  });
  const auto record = records_of(folder.path()).at(0);
  for (const char* name : {"nan", "infinite", "least", "empty"}) EXPECT_TRUE(record.at(name).is_null()) << name;
  EXPECT_EQ(record.at("mostly empty"), 3);
}

TEST(MetricLog, WarnsOnceAboutEachMetricThatIsNotFinite) {
  const auto warnings = [](int64_t every) {
    const TemporaryFolder folder;
    const LogLines log_lines;
    run_threads(3, [&](ProcessGroup world) {
      MetricLog log(world, folder.path(), {.every = every});
      log.log("failed", NAN);
      log.abandon_step();
      for (int step = 1; step <= 6; ++step) {
        log.log("one", step >= 3 && world.rank() == 1 ? NAN : 1);
        log.log("two", step >= 3 && world.rank() != 1 ? INFINITY : 1, {.reduce = MetricReduction::kMax});
        log.log("all", torch::tensor(step >= 5 ? -INFINITY : 1.0), {.reduce = MetricReduction::kSum});
        log.log("empty", NAN, {.weight = 0});
        log.end_step();
        log.flush();
      }
      log.log_epoch("accuracy", world.rank() == 2 ? NAN : 1);
      log.end_epoch();
      log.log_epoch("accuracy", NAN);
      log.end_epoch();
    });
    return log_lines.lines();
  };
  using testing::HasSubstr;
  const auto epoch = HasSubstr("NaN or infinite: metric 'accuracy' in epoch 1 on rank 2 ");
  EXPECT_THAT(warnings(1),
              testing::ElementsAre(HasSubstr("NaN or infinite: metric 'one' in step 3 on rank 1 and metric "
                                             "'two' in step 3 on ranks 0 and 2 "),
                                   HasSubstr("NaN or infinite: metric 'all' in step 5 on all 3 ranks "), epoch));
  EXPECT_THAT(warnings(2), testing::ElementsAre(HasSubstr("'one' in steps 3 to 4 on rank 1 and "),
                                                HasSubstr("'all' in steps 5 to 6 on all 3 ranks "), epoch));
  EXPECT_THAT(warnings(0),
              testing::ElementsAre(HasSubstr("metric 'accuracy' in epoch 1 on rank 2, metric 'all' in epoch 1 on all 3 "
                                             "ranks, metric 'one' in epoch 1 on rank 1 and metric 'two' in epoch 1")));
}

TEST(MetricLog, DropsTheValuesOfAStepThatFailed) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    MetricLog log(world, folder.path());
    log.log("loss", 100);
    log.abandon_step();
    log.log("loss", 1);
    log.end_step();
    EXPECT_EQ(log.steps(), 1);
    EXPECT_EQ(log.end_epoch().at("loss"), 1);
  });
}

TEST(MetricLog, TheTableHasTheRecords) {
  const TemporaryFolder folder;
  run_threads(1, [&](ProcessGroup world) {
    MetricLog log(world, folder.path(), {.every = 1});
    for (int64_t step = 1; step <= 3; ++step) {
      log.log("loss", 0.1 * static_cast<double>(step));
      if (step == 2) log.log("a \"new\", one", NAN);
      log.end_step(static_cast<double>(step) / 3);
    }
    log.log_epoch("accuracy", 0.5);
    log.end_epoch();
    log.log("loss", 0.4);  // appended: the rows above were written again when accuracy got a column
    log.end_step(4.0 / 3);
    log.flush();
    log.wait();
  });
  const auto lines = lines_of(folder.path() / "metrics.csv");
  ASSERT_EQ(lines.size(), 6);
  EXPECT_EQ(lines[0], "type,step,epoch,seconds,loss,\"a \"\"new\"\", one\",accuracy");
  const auto records = records_of(folder.path());
  for (size_t i = 0; i < records.size(); ++i) {
    const auto& record = records[i];
    std::string expected = record.at("type").get<std::string>();
    for (const char* name : {"step", "epoch", "seconds", "loss", "a \"new\", one", "accuracy"}) {
      expected += ",";
      if (record.contains(name) && !record.at(name).is_null()) expected += record.at(name).dump();
    }
    // Whole numbers may have a decimal point in one of the files.
    auto without_zero = [](std::string line) {
      for (size_t at; (at = line.find(".0,")) != line.npos;) line.erase(at, 2);
      return line;
    };
    EXPECT_EQ(without_zero(lines[i + 1]), without_zero(expected));
  }
}

// --- resuming

/// Logs as many steps as are left of 2 epochs of 10, and returns the state after step `stop`.
std::optional<Value> log_from(const ProcessGroup& world, const std::string& folder, const Value* state, int64_t stop) {
  MetricLog log(world, folder, {.every = 4});
  if (state) log.load_state_dict(*state);
  std::optional<Value> saved;
  if (log.steps() == 10 && log.epochs() == 0) log.end_epoch();
  while (log.steps() < 20) {
    log_all(log, log.steps() + 1, world.rank());
    log.log_epoch("steps", 1, {.reduce = MetricReduction::kSum});
    log.end_step();
    log.flush();
    if (log.steps() == stop) saved = log.state_dict();
    if (log.steps() % 10 == 0) log.end_epoch();
  }
  return saved;
}

json without_seconds(json record) {
  record.erase("seconds");
  return record;
}

TEST(MetricLog, ContinuesFromAnyStepAsIfItHadNotStopped) {
  const TemporaryFolder whole;
  run_threads(2, [&](ProcessGroup world) { log_from(world, whole.path(), nullptr, 0); });
  std::vector<json> expected;
  for (const auto& record : records_of(whole.path())) expected.push_back(without_seconds(record));
  for (int64_t stop = 1; stop < 20; ++stop) {
    SCOPED_TRACE(stop);
    const TemporaryFolder folder;
    run_threads(2, [&](ProcessGroup world) {
      const auto state = log_from(world, folder.path(), nullptr, stop);  // goes on after the state was taken
      world.barrier();
      log_from(world, folder.path(), &*state, 0);
    });
    std::vector<json> records;
    double before = 0;
    for (const auto& record : records_of(folder.path())) {
      records.push_back(without_seconds(record));
      EXPECT_GE(record.at("seconds"), before);
      before = record.at("seconds");
    }
    EXPECT_EQ(records, expected);
    EXPECT_EQ(lines_of(folder.path() / "metrics.csv").size(), expected.size() + 1);
  }
}

TEST(MetricLog, AnotherNumberOfRanksKeepsWhatAllRanksHadLogged) {
  for (const auto& [before, after] : {std::pair(3, 1), std::pair(1, 3), std::pair(3, 2)}) {
    const TemporaryFolder folder;
    Value state;
    run_threads(before, [&](ProcessGroup world) {
      MetricLog log(world, folder.path(), {.every = 4});
      for (int64_t step = 1; step <= 6; ++step) {
        log_all(log, step, world.rank());
        log.end_step();
      }
      const auto saved = log.state_dict();
      if (world.rank() == 0) state = saved;
    });
    run_threads(after, [&](ProcessGroup world) {
      MetricLog log(world, folder.path(), {.every = 4});
      log.load_state_dict(state);
      expect_record(json(log.end_epoch()).patch(json::parse(R"([{"op": "add", "path": "/step", "value": 6}])")), 1, 6,
                    before);
    });
  }
}

TEST(MetricLog, ALineThatWasCutOffIsRemoved) {
  const TemporaryFolder folder;
  Value state;
  run_threads(1, [&](ProcessGroup world) {
    MetricLog log(world, folder.path(), {.every = 1});
    for (int i = 0; i < 3; ++i) log.end_step();
    log.flush();
    log.wait();
    state = log.state_dict();
  });
  std::ofstream(folder.path() / "metrics.jsonl", std::ios::app) << R"({"type": "st)";
  run_threads(1, [&](ProcessGroup world) {
    MetricLog log(world, folder.path(), {.every = 1});
    log.load_state_dict(state);
    log.end_step();
    log.end_epoch();
  });
  std::vector<int64_t> steps;
  for (const auto& record : records_of(folder.path())) steps.push_back(record.at("step"));
  EXPECT_EQ(steps, (std::vector<int64_t>{1, 2, 3, 4, 4}));
}

// --- errors

TEST(MetricLog, AFullDiskCostsRecordsButNotTheTraining) {
  std::thread([] {  // the namespace belongs to this thread and its threads
    const TemporaryFolder folder;
    const bool is_mounted = ::unshare(CLONE_NEWNS) == 0 &&
                            ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
                            ::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=64k") == 0;
    if (!is_mounted) GTEST_SKIP() << "this user cannot mount a tmpfs";
    const LogLines log_lines;
    run_threads(1, [&](ProcessGroup world) {
      MetricLog log(world, folder.path(), {.every = 1, .csv = false, .tensorboard = false});
      const auto block = [&](const std::string& size) {
        std::ofstream(folder.path() / "block").write(std::string(60 << 10, 'x').data(), std::stoll(size));
      };
      for (int i = 0; i < 2000; ++i) {
        log.log("loss", i);
        log.end_step();
        log.flush();
        log.wait();
        if (i == 100) block("60000");
        if (i == 1500) ::unlink((folder.path() / "block").c_str());
      }
      EXPECT_EQ(log.end_epoch().at("loss"), 999.5);
    });
    EXPECT_THAT(log_lines.lines(),
                testing::Contains(testing::HasSubstr("metrics.jsonl: No space left on device")).Times(1));
    const auto records = records_of(folder.path());  // every line is whole
    EXPECT_LT(records.size(), 1900);
    EXPECT_GT(records.size(), 500);
    EXPECT_EQ(records.back().at("type"), "epoch");
    ::umount(folder.path().c_str());
  })
      .join();
}

TEST(MetricLog, FilesThatCannotBeOpenedCostRecordsButNotTheTraining) {
  const TemporaryFolder folder;
  const auto files = folder.path() / "run", moved = folder.path() / "moved";
  const LogLines log_lines;
  run_threads(2, [&](ProcessGroup world) {
    MetricLog log(world, files, {.every = 1});
    const auto step = [&] {
      log.log("loss", 1);
      log.end_step();
      log.flush();
      log.wait();
      world.barrier();
    };
    world.barrier();
    if (world.rank() == 0) std::filesystem::rename(files, moved);
    world.barrier();
    step();
    step();
    EXPECT_EQ(log.tensorboard(), nullptr);
    if (world.rank() == 0) std::filesystem::rename(moved, files);
    world.barrier();
    step();
    EXPECT_EQ(log.tensorboard() != nullptr, world.rank() == 0);
    EXPECT_EQ(log.end_epoch().at("loss"), 1);
  });
  EXPECT_THAT(log_lines.lines(), testing::ElementsAre(testing::AllOf(
                                     testing::HasSubstr("metrics.jsonl"), testing::HasSubstr("No such file"),
                                     testing::HasSubstr("lost until it can be written again"))));
  const auto records = records_of(files);
  ASSERT_EQ(records.size(), 2);
  EXPECT_EQ(records[0].at("step"), 3);
  EXPECT_EQ(records[1].at("type"), "epoch");
}

TEST(MetricLog, RefusesFilesThatAreLinksOrPipes) {
  for (const char* name : {"metrics.jsonl", "metrics.csv"})
    for (const bool is_link : {false, true}) {
      const TemporaryFolder folder;
      const auto path = folder.path() / name;
      if (is_link)
        std::filesystem::create_symlink(folder.path() / "target", path);
      else
        ASSERT_EQ(::mkfifo(path.c_str(), 0666), 0);
      run_threads(2, [&](ProcessGroup world) {
        expect_error<UsageError>([&] { MetricLog(world, folder.path()); }, path.string(),
                                 is_link ? "symbolic link" : "not a regular file");
      });
    }
}

TEST(MetricLog, RefusesWhatItCannotRecord) {
  const TemporaryFolder folder;
  run_threads(1, [&](ProcessGroup world) {
    MetricLog log(world, folder.path());
    expect_error<UsageError>([&] { log.log("step", 1); }, "name 'step'", "type, step, epoch and seconds");
    expect_error<UsageError>([&] { log.log("", 1); }, "name ''");
    expect_error<UsageError>([&] { log.log("loss", torch::zeros({2, 3})); }, "'loss'", "[2, 3]", "one element");
    expect_error<UsageError>([&] { log.log("loss", at::Tensor()); }, "undefined tensor");
    log.log("loss", 1);
    log.log("loss", 1, {.reduce = MetricReduction::kSum});
    expect_error<UsageError>([&] { log.end_step(); }, "'loss'", "kSum", "before with MetricReduction::kMean");
    expect_error<UsageError>([&] { MetricLog(world, folder.path(), {.every = -1}); }, "every is -1");
    std::ofstream(folder.path() / "file") << "x";
    expect_error<SystemError>([&] { MetricLog(world, folder.path() / "file" / "run"); }, "mkdir");
  });
}

TEST(MetricLog, RefusesCallsInAJoinWhereRanksMakeDifferentNumbersOfCalls) {
  const TemporaryFolder folder;
  run_threads(2, [&](ProcessGroup world) {
    DistributedDataParallel ddp(torch::nn::Linear(1, 1), world);
    MetricLog log(world, folder.path());
    const auto alone = world.split_group(world.rank(), 0);
    MetricLog of_rank(alone, (folder.path() / std::to_string(world.rank())).string());
    ddp.join([&] {
      for (int i = 0; i <= world.rank(); ++i) {
        ddp(torch::ones({1, 1})).mean().backward();
        log.log("number", i);
        of_rank.end_step();  // communicates with no other rank
        expect_error<UsageError>([&] { log.end_step(); }, "MetricLog: end_step() is called inside of join()",
                                 "call log() inside of join()");
        expect_error<UsageError>([&] { log.flush(); }, "flush() is called inside of join()");
        expect_error<UsageError>([&] { log.end_epoch(); }, "end_epoch() is called inside of join()");
        expect_error<UsageError>([&] { log.state_dict(); }, "state_dict() is called inside of join()");
        expect_error<UsageError>([&] { MetricLog(world, folder.path()); }, "constructor is called inside of join()");
      }
    });
    log.end_step();
    EXPECT_NEAR(log.end_epoch().at("number"), (0 + 0 + 1) / 3.0, 1e-12);
  });
}

TEST(MetricLog, AnErrorOfTheThreadReachesTheTraining) {
  const TemporaryFolder folder;
  const auto train = [&](ProcessGroup world) {
    MetricLog log(world, folder.path(), {.every = 1});
    if (world.rank() == 1) throw std::runtime_error("the end of rank 1");
    log.end_step();
    log.flush();
    expect_error<PeerError>([&] { log.wait(); }, "rank 1");
    expect_error<PeerError>([&] { log.flush(); }, "rank 1");
  };
  EXPECT_THROW(run_threads(2, train), std::runtime_error);
}

}  // namespace
}  // namespace lockstep
