// Runs as the catalog describes them, with real files that change.

#include "ui/run_catalog.h"

#include <chrono>
#include <fstream>
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/live_folder.h"
#include "support/eventually.h"
#include "support/temporary_folder.h"
#include "ui/answers.h"

namespace lockstep::ui {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using namespace std::chrono_literals;

class Catalog : public testing::Test {
 protected:
  void write(const std::string& name, const std::string& text, std::ios::openmode mode = std::ios::trunc) const {
    fs::create_directories((folder_.path() / name).parent_path());
    std::ofstream(folder_.path() / name, mode) << text;
  }

  /// Waits until the description of the only run fulfils the condition, and returns it.
  static Json run_when(const RunCatalog& catalog, const std::function<bool(const Json&)>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + 60s;
    Json last;
    while (std::chrono::steady_clock::now() < deadline) {
      last = catalog.descriptions()["runs"];
      if (last.size() == 1 && condition(last[0])) return last[0];
      std::this_thread::sleep_for(10ms);
    }
    ADD_FAILURE() << "the condition was not fulfilled; the runs are " << last.dump(2);
    return last.empty() ? Json::object() : last[0];
  }

  TemporaryFolder folder_;
};

constexpr const char* kLine = "{\"type\":\"step\",\"step\":1,\"epoch\":0.1,\"seconds\":2,\"loss\":0.5}\n";

TEST_F(Catalog, DescribesARun) {
  write("a/metrics.jsonl", kLine);
  write("a/settings.json", R"({"lr": 0.1, "deep": {"x": {"y": 1}, "z": 2}, "list": [1]})");
  write("a/summary.json", R"({"status": "complete", "metrics": {"loss": 0.4}})");
  const RunCatalog catalog({folder_.path()});
  const auto run = run_when(catalog, [](const Json& one) { return one["reading"] == false; });
  EXPECT_EQ(run["name"], "a");
  EXPECT_EQ(run["state"], "complete");
  EXPECT_EQ(run["settings"], Json::parse(R"({"lr": 0.1, "deep": {"z": 2}})"));
  EXPECT_EQ(run["summary"]["metrics"]["loss"], 0.4);
  EXPECT_EQ(run["last"]["loss"], 0.5);
  EXPECT_EQ(run["step"], 1);
  EXPECT_EQ(run["records"], 1);
  EXPECT_EQ(run["problems"], Json::array());
}

TEST_F(Catalog, NoticesNewRecordsAndTheEnd) {
  write("a/metrics.jsonl", kLine);
  const RunCatalog catalog({folder_.path()});
  const auto first = run_when(catalog, [](const Json& run) { return run["records"] == 1; });
  EXPECT_EQ(first["state"], "running");
  write("a/metrics.jsonl", kLine, std::ios::app);
  const auto second = run_when(catalog, [](const Json& run) { return run["records"] == 2; });
  EXPECT_GT(second["version"], first["version"]);
  write("a/summary.json", R"({"status": "stopped early"})");
  run_when(catalog, [](const Json& run) { return run["state"] == "stopped early"; });
}

TEST_F(Catalog, FindsNewRunsAndMarksRemovedOnes) {
  const RunCatalog catalog({folder_.path()});
  EXPECT_TRUE(catalog.runs().empty());
  write("new/metrics.jsonl", kLine);
  run_when(catalog, [](const Json& run) { return run["records"] == 1; });
  remove_folder(folder_.path() / "new");
  run_when(catalog, [](const Json& run) { return run["state"] == "removed"; });
}

TEST_F(Catalog, ShowsDamageAsProblems) {
  write("a/metrics.jsonl", std::string("garbage\n") + kLine);
  write("a/settings.json", "{\"lr\": ");
  write("a/summary.json", std::string(200000, '['));
  const RunCatalog catalog({folder_.path()});
  const auto run =
      run_when(catalog, [](const Json& one) { return one["records"] == 1 && one["problems"].size() == 3; });
  EXPECT_THAT(run["problems"].dump(), testing::HasSubstr("1 damaged line"));
  EXPECT_THAT(run["problems"].dump(), testing::HasSubstr("settings.json: it is damaged"));
  EXPECT_THAT(run["problems"].dump(), testing::HasSubstr("summary.json: it is damaged"));
  EXPECT_EQ(run["settings"], nullptr);
}

TEST_F(Catalog, FollowsNoLinkOutOfARun) {
  const auto secret = [](const std::string& name) { return "\"secret\": \"" + name + "\""; };
  write("outside/metrics.jsonl", "{\"type\":\"step\",\"step\":1,\"secret\":7}\n");
  write("outside/settings.json", "{" + secret("settings") + "}");
  write("outside/live/output-00000.log", "secret output\n");
  write("outside/live/rank-00000.json",
        "{\"format\": 1, \"rank\": 0, \"updated\": 1, \"state\": \"running\", \"host\": \"secret host\"}");
  write("outside/checkpoints/step-00000001.pt", "secret");
  write("runs/files/live/node-000.json", "{}");
  fs::create_directories(folder_.path() / "runs/files/checkpoints");
  write("runs/folders/summary.json", "{}");
  const auto link = [&](const std::string& run, const std::string& name) {
    fs::create_symlink(folder_.path() / "outside" / name, folder_.path() / "runs" / run / name);
  };
  for (const auto* name : {"metrics.jsonl", "settings.json", "live/output-00000.log", "live/rank-00000.json",
                           "checkpoints/step-00000001.pt"})
    link("files", name);
  for (const auto* name : {"live", "checkpoints"}) link("folders", name);

  const RunCatalog catalog({folder_.path() / "runs"});
  Json runs;
  EXPECT_TRUE(eventually(
      [&] {
        const auto all = catalog.descriptions();
        runs = all["runs"];
        return all["reading"] == false && runs.size() == 2 && !runs[0]["state"].get<std::string>().empty();
      },
      60s));
  EXPECT_EQ(runs[0]["records"], 0);
  EXPECT_THAT(runs[0]["problems"],
              testing::UnorderedElementsAre("metrics.jsonl: it is a symbolic link, which is not followed",
                                            "settings.json: it is a symbolic link, which is not followed"));
  EXPECT_THAT(runs[1]["problems"],
              testing::UnorderedElementsAre("live: it is a symbolic link, which is not followed",
                                            "checkpoints: it is a symbolic link, which is not followed"));
  EXPECT_THAT(runs.dump(), testing::Not(testing::HasSubstr("secret")));
  for (const auto* run : {"0", "1"}) {
    EXPECT_THAT(answer_ranks(catalog, {{"run", run}}).body, testing::Not(testing::HasSubstr("secret"))) << run;
    const auto output = Json::parse(answer_output(catalog, {{"run", run}, {"rank", "0"}}).body);
    EXPECT_EQ(output["lines"], Json::array()) << run;
    EXPECT_THAT(output["problem"].get<std::string>(), testing::EndsWith("it is a symbolic link, which is not followed"))
        << run;
    EXPECT_EQ(Json::parse(answer_checkpoints(catalog, {{"run", run}}).body)["files"], Json::array()) << run;
  }
  EXPECT_THAT(answer_open_metrics(catalog).body, testing::Not(testing::HasSubstr("secret")));
}

TEST_F(Catalog, NoticesALinkThatAppearsLater) {
  write("a/summary.json", "{}");
  fs::create_directory(folder_.path() / "a/live");
  const RunCatalog catalog({folder_.path()});
  run_when(catalog, [](const Json& run) { return run["state"] == "complete" && run["reading"] == false; });
  const auto change = [&](const std::function<void()>& action, const std::function<bool(const Json&)>& condition) {
    const auto before = catalog.version();
    action();
    EXPECT_TRUE(eventually([&] { return catalog.version() > before; }, 60s));
    return run_when(catalog, condition);
  };
  change([&] { fs::create_symlink(folder_.path(), folder_.path() / "a/checkpoints"); },
         [](const Json& run) { return run["problems"].size() == 1; });
  const auto time = fs::last_write_time(folder_.path() / "a/live") + 1h;
  const auto later = change([&] { fs::last_write_time(folder_.path() / "a/live", time); },
                            [](const Json& run) { return run["changed"] > unix_time() + 1800; });
  EXPECT_EQ(later["problems"], Json::parse(R"(["checkpoints: it is a symbolic link, which is not followed"])"));
}

TEST_F(Catalog, SaysThatLinksWereSkipped) {
  const RunCatalog catalog({folder_.path()});
  EXPECT_EQ(catalog.descriptions()["has_skipped_links"], false);
  const auto before = catalog.version();
  fs::create_symlink("/nowhere", folder_.path() / "link");
  EXPECT_TRUE(eventually([&] { return catalog.version() > before; }, 60s));
  EXPECT_EQ(catalog.descriptions()["has_skipped_links"], true);
}

TEST_F(Catalog, ResolvesTheNamedFoldersOnce) {
  write("first/a/metrics.jsonl", kLine);
  write("second/secret/metrics.jsonl", kLine);
  const auto link = folder_.path() / "link";
  fs::create_directory_symlink("first", link);
  const RunCatalog catalog({link});
  fs::remove(link);
  fs::create_directory_symlink("second", link);
  write("first/b/metrics.jsonl", kLine);
  Json runs;
  const auto finds_b = [&] {
    runs = catalog.descriptions()["runs"];
    return runs.dump().find("first/b") != std::string::npos;
  };
  EXPECT_TRUE(eventually(finds_b, 60s)) << "a later search";
  EXPECT_THAT(runs.dump(), testing::Not(testing::HasSubstr("secret")));
  EXPECT_THROW(RunCatalog({folder_.path() / "none"}), fs::filesystem_error);
}

TEST_F(Catalog, ShowsNothingOfARunThatBecomesALink) {
  write("outside/live/output-00000.log", "secret output\n");
  write("runs/a/live/output-00000.log", "own output\n");
  write("runs/a/metrics.jsonl", kLine);
  const RunCatalog catalog({folder_.path() / "runs"});
  const auto lines = [&] { return Json::parse(answer_output(catalog, {{"run", "0"}, {"rank", "0"}}).body)["lines"]; };
  EXPECT_EQ(lines(), Json::parse(R"(["own output"])"));
  fs::rename(folder_.path() / "runs", folder_.path() / "former");
  fs::create_directory(folder_.path() / "runs");
  fs::create_symlink("../outside", folder_.path() / "runs/a");
  EXPECT_EQ(lines(), Json::array());
  fs::remove(folder_.path() / "runs/a");
  fs::remove(folder_.path() / "runs");
  fs::create_directory_symlink("former", folder_.path() / "runs");
  EXPECT_EQ(lines(), Json::array());
}

TEST_F(Catalog, SmoothsNoiseAndNoSchedules) {
  std::string lines;
  for (int step = 1; step <= 40; ++step) {
    const Json line{{"type", "step"},
                    {"step", step},
                    {"loss", 1 + step * 7919 % 13},
                    {"rate", 0.1 / (1 << step / 10)},
                    {"cyclic/lr", step % 2 == 0 ? 0.1 : 0.2}};
    lines += line.dump() + "\n";
  }
  write("a/metrics.jsonl", lines);
  const RunCatalog catalog({folder_.path()});
  run_when(catalog, [](const Json& run) { return run["records"] == 40; });
  const auto steps_of = [&](const std::string& metric) {
    const auto answer =
        Json::parse(answer_curves(catalog, {{"runs", "0"}, {"metric", metric}, {"smooth", "0.9"}}).body);
    return answer["curves"][0]["steps"];
  };
  EXPECT_EQ(steps_of("loss")["smooth"].size(), 40U);
  for (const auto* schedule : {"rate", "cyclic/lr"}) {
    const auto steps = steps_of(schedule);
    EXPECT_FALSE(steps.contains("smooth")) << schedule;
    EXPECT_EQ(steps["low"].size(), 40U) << schedule;
  }
  EXPECT_EQ(steps_of("rate")["low"].back(), 0.1 / 16) << "as recorded";
}

TEST_F(Catalog, AnswersCurvesOfRunsThatExist) {
  write("a/metrics.jsonl", std::string(kLine) + "{\"type\":\"step\",\"step\":2,\"loss\":null}\n");
  const RunCatalog catalog({folder_.path()});
  run_when(catalog, [](const Json& run) { return run["records"] == 2; });
  const auto answer =
      Json::parse(answer_curves(catalog, {{"runs", "0,7,x"}, {"metric", "loss"}, {"smooth", "0.5"}}).body);
  ASSERT_EQ(answer["curves"].size(), 1U);
  EXPECT_EQ(answer["curves"][0]["steps"]["x"], Json::parse("[1,2]"));
  EXPECT_EQ(answer["curves"][0]["steps"]["low"], Json::parse("[0.5,null]"));
  EXPECT_FALSE(answer["curves"][0]["steps"].contains("smooth")) << "two values are no noise";
  EXPECT_EQ(answer_curves(catalog, {{"x", "other"}}).status, 400);
  for (const auto* id : {"7", "-1", "", "x", "99999999999"}) {
    EXPECT_EQ(answer_ranks(catalog, {{"run", id}}).status, 404) << id;
    EXPECT_EQ(answer_checkpoints(catalog, {{"run", id}}).status, 404) << id;
    EXPECT_EQ(answer_output(catalog, {{"run", id}, {"rank", "0"}}).status, 404) << id;
  }
  for (const auto* rank : {"-1", "", "../1", "x"})
    EXPECT_EQ(answer_output(catalog, {{"run", "0"}, {"rank", rank}}).status, 400) << rank;
  EXPECT_EQ(Json::parse(answer_output(catalog, {{"run", "0"}, {"rank", "0"}}).body)["lines"], Json::array());
}

}  // namespace
}  // namespace lockstep::ui
