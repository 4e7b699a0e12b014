// The files that ranks and the launcher write while a training runs: processes under `lockstep run`.

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>
#include <lockstep/training_run.h>

#include "launch/launcher_process.h"
#include "support/log_lines.h"
#include "support/messages.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

/// Null if the file is missing. A file is never seen in parts.
json read_json(const fs::path& path) {
  std::ifstream file(path);
  return file ? json::parse(file) : json();
}

std::string read_text(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

json rank_file(const fs::path& run, int rank) {
  return read_json(run / "live" / ("rank-0000" + std::to_string(rank) + ".json"));
}
json node_file(const fs::path& run) {
  return read_json(run / "live/node-000.json");
}
std::string output_file(const fs::path& run, int rank) {
  return read_text(run / "live" / ("output-0000" + std::to_string(rank) + ".log"));
}

/// Returns the content once it meets the condition. Otherwise the test fails.
json await(const std::function<json()>& read, const std::function<bool(const json&)>& is_met,
           std::chrono::seconds limit = 60s) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  json content;
  while (std::chrono::steady_clock::now() < deadline) {
    content = read();
    if (!content.is_null() && is_met(content)) return content;
    std::this_thread::sleep_for(20ms);
  }
  ADD_FAILURE() << "waited in vain; last: " << content.dump();
  return content;
}

/// `lockstep run` with ranks that train in a folder.
class WatchedJob {
 public:
  explicit WatchedJob(const fs::path& run, int ranks, std::vector<std::string> words = {},
                      std::vector<std::string> options = {})
      : run_(run), ranks_(ranks) {
    std::vector<std::string> arguments{"-n", std::to_string(ranks)};
    arguments.insert(arguments.end(), options.begin(), options.end());
    arguments.insert(arguments.end(), {TEST_RANKS, "running_rank", "watched", run.string()});
    arguments.insert(arguments.end(), words.begin(), words.end());
    process_.emplace(run_command(arguments), clean_environment({{"LOCKSTEP_JOB_ID", "watched"}}));
  }

  RankProcess& launcher() { return *process_; }
  json rank(int rank, const std::function<bool(const json&)>& is_met) {
    return await([&] { return rank_file(run_, rank); }, is_met);
  }
  json node(const std::function<bool(const json&)>& is_met) {
    return await([&] { return node_file(run_); }, is_met);
  }
  /// Waits until all ranks have taken steps.
  void await_steps() {
    for (int i = 0; i < ranks_; ++i)
      rank(i, [&](const json& file) { return file["state"] == "running" && !file["steps_per_second"].is_null(); });
    node([&](const json& file) { return file["workers"].size() == static_cast<size_t>(ranks_); });
  }
  int pid(int rank) { return rank_file(run_, rank).at("pid"); }

 private:
  const fs::path run_;
  const int ranks_;
  std::optional<RankProcess> process_;
};

TEST(LiveFiles, SayWhatEachRankOfARunningJobDoes) {
  const TemporaryFolder folder;
  WatchedJob job(folder.path(), 4, {"slow", "2"});
  job.await_steps();
  std::vector<json> ranks;
  for (int i = 0; i < 4; ++i)
    ranks.push_back(job.rank(i, [](const json& file) {
      return file["step"].get<int>() > 30 && file["time"]["backward"].is_number() && file["time"]["data"].is_number();
    }));
  for (int i = 0; i < 4; ++i) {
    const auto& file = ranks[static_cast<size_t>(i)];
    EXPECT_EQ(file["format"], 1);
    EXPECT_EQ(file["job"], "watched");
    EXPECT_EQ(file["attempt"], 0);
    EXPECT_EQ(file["rank"], i);
    EXPECT_EQ(file["local_rank"], i);
    EXPECT_EQ(file["world_size"], 4);
    EXPECT_EQ(file["device"], "cpu");
    EXPECT_EQ(file["epochs"], 1);
    EXPECT_EQ(file["batches"], 1'000'000);
    EXPECT_LE(std::abs(file["batch"].get<int>() - file["step"].get<int>()), 1);
    EXPECT_GT(file["epoch"], 0);
    EXPECT_GT(file["updated"], file["started"]);
    EXPECT_GT(file["memory"]["resident_bytes"], 10 << 20);
    EXPECT_TRUE(file["gpu"].is_null());
    EXPECT_TRUE(file["call"].is_null());
    EXPECT_TRUE(file["failure"].is_null());
    EXPECT_GT(file["steps_per_second"], 5);
    EXPECT_LT(file["steps_per_second"], 20) << "the slow rank sleeps 50 ms in each step";
    EXPECT_NEAR(file["samples_per_second"], 4 * file["steps_per_second"].get<double>(), 4);
    double sum = 0;
    for (const auto& [name, share] : file["time"].items()) sum += share.get<double>();
    EXPECT_NEAR(sum, 1, 0.02) << file["time"];
    if (i != 2) {
      EXPECT_GT(file["time"]["communication"], 0.5) << "it waits for the slow rank";
    }
  }
  EXPECT_LT(ranks[2]["time"]["communication"], 0.3);
  EXPECT_GT(ranks[2]["time"]["other"], 0.5) << "it sleeps between forward and backward";

  const auto node = node_file(folder.path());
  EXPECT_EQ(node["format"], 1);
  EXPECT_EQ(node["job"], "watched");
  EXPECT_EQ(node["nodes"], 1);
  EXPECT_EQ(node["node"], 0);
  EXPECT_EQ(node["state"], "running");
  EXPECT_EQ(node["pid"], job.launcher().pid());
  EXPECT_EQ(node["command"][0], TEST_RANKS);
  EXPECT_TRUE(node["report"].is_null());
  for (int i = 0; i < 4; ++i) {
    const auto& worker = node["workers"][static_cast<size_t>(i)];
    EXPECT_EQ(worker["rank"], i);
    EXPECT_EQ(worker["pid"], ranks[static_cast<size_t>(i)]["pid"]);
    EXPECT_EQ(worker["state"], "running");
    EXPECT_EQ(worker["failed"], false);
  }
  const auto settings = read_json(folder.path() / "settings.json");
  EXPECT_EQ(settings, json::parse(R"({"amp":false,"batch_size":4,"lr":0.001,"model":"linear","seed":1})"));

  job.launcher().signal(SIGTERM);
  EXPECT_EQ(job.launcher().wait(), 6) << job.launcher().output();
  for (int i = 0; i < 4; ++i) EXPECT_EQ(rank_file(folder.path(), i)["state"], "stopped");
  const auto ended = node_file(folder.path());
  EXPECT_EQ(ended["state"], "ended");
  EXPECT_EQ(ended["report"]["exit_code"], 6);
  for (const auto& worker : ended["workers"]) {
    EXPECT_EQ(worker["state"], "ended");
    EXPECT_EQ(worker["failed"], false) << "it was preempted";
  }
  for (int i = 0; i < 4; ++i)
    EXPECT_THAT(output_file(folder.path(), i),
                AllOf(HasSubstr("ready\n"), HasSubstr("warning of rank " + std::to_string(i) + "\n")));
}

TEST(LiveFiles, SayWhichRankWasKilledAndHowTheOthersFailed) {
  const TemporaryFolder folder;
  WatchedJob job(folder.path(), 4);
  job.await_steps();
  ::kill(job.pid(1), SIGKILL);
  EXPECT_EQ(job.launcher().wait(), 4) << job.launcher().output();
  EXPECT_EQ(rank_file(folder.path(), 1)["state"], "running") << "nobody could change it";
  const auto node = node_file(folder.path());
  EXPECT_EQ(node["workers"][1]["failed"], true);
  EXPECT_THAT(node["workers"][1]["how"], HasSubstr("killed by SIGKILL"));
  EXPECT_EQ(node["report"]["culprit"]["rank"], 1);
  for (int i : {0, 2, 3}) {
    const auto file = rank_file(folder.path(), i);
    EXPECT_EQ(file["state"], "failed");
    EXPECT_EQ(file["failure"]["kind"], "PeerError");
    EXPECT_THAT(file["failure"]["message"], HasSubstr("rank 1"));
    EXPECT_TRUE(fs::exists(file["failure"]["flight_recorder"])) << file["failure"]["flight_recorder"];
    ASSERT_EQ(file["failure"]["calls"].size(), 20u);
    for (const auto& call : file["failure"]["calls"])  // of all groups of the rank
      EXPECT_THAT(call["group"].get<std::string>(), testing::StartsWith("world"));
    EXPECT_TRUE(node["workers"][static_cast<size_t>(i)]["failed"]);
  }
}

TEST(LiveFiles, SayInWhichCallTheOthersWaitForAStoppedRank) {
  const TemporaryFolder folder;
  WatchedJob job(folder.path(), 3);
  job.await_steps();
  const int stopped = job.pid(2);
  ::kill(stopped, SIGSTOP);
  for (int i : {0, 1}) {
    const auto file = job.rank(i, [](const json& content) { return !content["call"].is_null(); });
    EXPECT_EQ(file["state"], "running");
    EXPECT_EQ(file["call"]["operation"], "all_reduce");
    EXPECT_THAT(file["call"]["group"], HasSubstr("world"));
    EXPECT_GT(file["call"]["number"], 3);
    EXPECT_GE(file["call"]["seconds"], 0.5);
    EXPECT_FALSE(file["call"]["where"].get<std::string>().empty());
  }
  const double last = rank_file(folder.path(), 2)["updated"];
  job.rank(0, [&](const json& content) { return content["updated"].get<double>() > last + 2; });
  EXPECT_EQ(rank_file(folder.path(), 2)["updated"], last) << "a stopped process writes nothing";
  ::kill(stopped, SIGCONT);
  job.rank(2, [&](const json& content) { return content["updated"].get<double>() > last + 2; });
  job.rank(0, [](const json& content) { return content["call"].is_null(); });
  job.launcher().signal(SIGTERM);
  EXPECT_EQ(job.launcher().wait(), 6) << job.launcher().output();
}

TEST(LiveFiles, SayWhatAnExceptionSaidAndThatTheRunWasRestarted) {
  const TemporaryFolder folder;
  WatchedJob job(folder.path(), 2, {"throw", "1"}, {"--max-restarts", "1"});
  EXPECT_EQ(job.launcher().wait(), 4) << job.launcher().output();
  const auto node = node_file(folder.path());
  EXPECT_EQ(node["attempt"], 1);
  EXPECT_EQ(node["report"]["restarts"], 1);
  EXPECT_EQ(node["workers"][1]["uncaught"], "std::runtime_error: no such sample");
  EXPECT_EQ(rank_file(folder.path(), 0)["attempt"], 1);
  EXPECT_EQ(rank_file(folder.path(), 0)["state"], "failed");
  EXPECT_THAT(output_file(folder.path(), 1), HasSubstr("what():  no such sample\n"));
}

TEST(LiveFiles, SayWhereAValueWasNotFiniteThatStoppedTheRun) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "summary.json") << "{}";  // of an earlier start
  WatchedJob job(folder.path(), 2, {"nan", "1"});
  EXPECT_EQ(job.launcher().wait(), 4) << job.launcher().output();
  EXPECT_THAT(job.launcher().output(), HasSubstr("metric 'loss' in step 20 on rank 1"));
  for (int i = 0; i < 2; ++i) {
    const auto file = rank_file(folder.path(), i);
    EXPECT_EQ(file["state"], "failed");
    EXPECT_EQ(file["failure"]["kind"], "Error");
    EXPECT_THAT(file["failure"]["message"].get<std::string>(), HasSubstr("metric 'loss' in step 20 on rank 1"));
  }
  EXPECT_FALSE(fs::exists(folder.path() / "summary.json")) << "the run is not complete";
}

TEST(LiveFiles, OfAShortRunAreComplete) {
  const TemporaryFolder folder;
  {
    WatchedJob job(folder.path(), 3, {"quick"});
    EXPECT_EQ(job.launcher().wait(), 0) << job.launcher().output();
    for (int i = 0; i < 3; ++i) {
      EXPECT_EQ(rank_file(folder.path(), i)["state"], "finished");
      EXPECT_EQ(rank_file(folder.path(), i)["step"], 5);
      EXPECT_EQ(rank_file(folder.path(), i)["epoch"], 1);
      EXPECT_THAT(output_file(folder.path(), i), HasSubstr("ready\n"));
    }
    EXPECT_EQ(node_file(folder.path())["state"], "ended");
    EXPECT_EQ(node_file(folder.path())["report"]["exit_code"], 0);
  }
  // A second start with fewer ranks, after files of a node that does not take part.
  std::ofstream(folder.path() / "live/node-007.json") << "{}";
  std::ofstream(folder.path() / "live/other.txt") << "not ours";
  WatchedJob job(folder.path(), 1, {"quick"});
  EXPECT_EQ(job.launcher().wait(), 0) << job.launcher().output();
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path() / "live")) names.insert(entry.path().filename());
  EXPECT_THAT(names, testing::ElementsAre("node-000.json", "other.txt", "output-00000.log", "rank-00000.json"));
}

TEST(LiveFiles, AreNotWrittenIfTheyAreOff) {
  const TemporaryFolder folder;
  fs::create_directories(folder.path() / "live");
  std::ofstream(folder.path() / "live/rank-00000.json") << "{}";  // of an earlier start
  WatchedJob job(folder.path(), 2, {"off"});
  job.launcher().expect_line("[0] ready");
  const auto records = folder.path() / "metrics.jsonl";
  await([&] { return json(fs::exists(records) ? fs::file_size(records) : 0); },
        [](const json& size) { return size > 2000; });
  job.launcher().signal(SIGTERM);
  EXPECT_EQ(job.launcher().wait(), 6) << job.launcher().output();
  EXPECT_TRUE(fs::is_empty(folder.path() / "live"));
  EXPECT_TRUE(fs::exists(folder.path() / "settings.json"));
}

TEST(LiveFiles, ThatCannotBeWrittenDoNotDisturbTheJob) {
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "live") << "a file in the place of the folder";
  WatchedJob job(folder.path(), 2, {"quick"});
  EXPECT_EQ(job.launcher().wait(), 0) << job.launcher().output();
  EXPECT_TRUE(fs::exists(folder.path() / "summary.json"));
  const auto& output = job.launcher().output();
  EXPECT_THAT(output, HasSubstr("the training continues without the live status of this rank"));
  EXPECT_THAT(output, HasSubstr("the job continues without the launcher's live files"));
}

// --- ranks as threads

TrainingRunOptions quiet_options() {
  TrainingRunOptions options;
  options.progress.output = ProgressOptions::Output::kOff;
  return options;
}

TEST(LiveStatus, LogsADiskErrorOnceAndTriesAgain) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "live/rank-00000.json";
  fs::create_directories(file / "in the way");
  const LogLines log;
  run_threads(1, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet_options());
    run.next_epoch(1);
    run.step([] {});
    const auto warnings = [&] {
      const auto lines = log.lines();
      return std::count_if(lines.begin(), lines.end(), [&](const std::string& line) {
        return line.starts_with("rename " + file.string()) &&
               line.ends_with("the training continues without the live status of this rank");
      });
    };
    await([&] { return json(warnings()); }, [](const json& count) { return count.get<int>() > 0; });
    const auto pause = std::chrono::steady_clock::now() + 2500ms;  // several more writes fail
    while (std::chrono::steady_clock::now() < pause) run.step([] { ::usleep(10'000); });
    EXPECT_EQ(warnings(), 1);
    fs::remove(file / "in the way");
    fs::remove(file);
    await([&] { return read_json(file); }, [](const json& content) { return content["step"].get<int>() > 1; });
    run.next_epoch(1);
  });
  EXPECT_EQ(read_json(file)["state"], "finished");
}

TEST(LiveStatus, HasFailedAfterAnExceptionThatLeavesTheScope) {
  const TemporaryFolder folder;
  run_threads(1, [&](ProcessGroup world) {
    try {
      TrainingRun run(world, folder.path(), TrainingState{}, quiet_options());
      run.next_epoch(1);
      run.step([] { throw std::runtime_error("no such sample"); });
    } catch (const std::runtime_error&) {
    }
    EXPECT_EQ(rank_file(folder.path(), 0)["state"], "failed");
    EXPECT_EQ(rank_file(folder.path(), 0)["failure"]["kind"], "exception");
    TrainingRun(world, folder.path(), TrainingState{}, quiet_options());
    EXPECT_EQ(rank_file(folder.path(), 0)["state"], "stopped") << "it was not complete";
  });
}

TEST(LiveStatus, OfRanksAsThreadsIsThatOfEachRank) {
  const TemporaryFolder folder;
  run_threads(3, [&](ProcessGroup world) {
    TrainingRun run(world, folder.path(), TrainingState{}, quiet_options());
    while (run.next_epoch(2)) run.step([&] { world.barrier(); });
  });
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(rank_file(folder.path(), rank)["rank"], rank);
    EXPECT_EQ(rank_file(folder.path(), rank)["step"], 2);
    EXPECT_EQ(rank_file(folder.path(), rank)["state"], "finished");
  }
}

TEST(Settings, AreRewrittenOrRemovedByTheNextStart) {
  const TemporaryFolder folder;
  const auto file = folder.path() / "settings.json";
  const auto start = [&](std::map<std::string, RunSetting> settings) {
    run_threads(2, [&](ProcessGroup world) {
      auto options = quiet_options();
      options.settings = settings;
      TrainingRun run(world, folder.path(), TrainingState{}, options);
    });
  };
  start(
      {{"a", int8_t{-3}}, {"b", 0.5F}, {"c", true}, {"d", "text"}, {"e", std::string("\xff")}, {"f", size_t{1} << 63}});
  EXPECT_EQ(read_json(file),
            json::parse(R"({"a":-3,"b":0.5,"c":true,"d":"text","e":"\ufffd","f":9223372036854775808})"));
  start({{"a", std::numeric_limits<double>::infinity()}});
  EXPECT_EQ(read_text(file), "{\n  \"a\": null\n}\n");
  start({});
  EXPECT_FALSE(fs::exists(file));
}

}  // namespace
}  // namespace lockstep
