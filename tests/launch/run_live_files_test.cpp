// The files of a training run that the launcher writes. The workers are shells, which note a folder as ranks do.

#include <sys/mount.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "launch/launcher_process.h"
#include "launch/live_files.h"
#include "support/eventually.h"
#include "support/network_host.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;
namespace fs = std::filesystem;

json json_of(const fs::path& path) {
  std::ifstream file(path);
  return file ? json::parse(file) : json();
}

std::string content_of(const fs::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// A worker that notes the folder and then runs the script.
std::vector<std::string> noting(const fs::path& folder, const std::string& script) {
  return {"sh", "-c", "printf %s \"$1\" > \"$LOCKSTEP_RUN_NOTE\"; " + script, "sh", folder.string()};
}

std::vector<std::string> with(std::vector<std::string> options, const std::vector<std::string>& command) {
  options.insert(options.end(), command.begin(), command.end());
  return options;
}

TEST(OutputTail, DropsTheOlderHalfInWholeLines) {
  OutputTail tail;
  EXPECT_TRUE(tail.take_change()->is_whole) << "the file is made";
  tail.add("first");
  auto change = tail.take_change();
  EXPECT_FALSE(change->is_whole);
  EXPECT_EQ(change->bytes, "first\n");
  EXPECT_FALSE(tail.take_change());
  size_t whole = 0;
  for (int i = 0; i < 100'000; ++i) {
    tail.add("line " + std::to_string(i));
    change = tail.take_change();
    ASSERT_TRUE(change->bytes.ends_with("line " + std::to_string(i) + "\n"));
    ASSERT_TRUE(change->bytes.starts_with("line ")) << i;
    ASSERT_LE(change->bytes.size(), OutputTail::kMaxBytes);
    whole += change->is_whole ? 1 : 0;
  }
  EXPECT_GT(whole, 10u);
  EXPECT_LT(whole, 25u) << "most lines are appended";
  tail.add(std::string(1 << 20, 'x'));
  EXPECT_LE(tail.take_change()->bytes.size(), OutputTail::kMaxBytes);
}

TEST(RunLiveFiles, HaveTheLastOutputOfEachWorker) {
  const TemporaryFolder folder;
  const auto run = run_launcher(with(
      {"-n", "2", "--local-ranks-filter", "0"},
      noting(folder.path(), "echo early; [ $RANK = 0 ] || seq 1 60000; echo last of $RANK >&2; printf unfinished")));
  EXPECT_EQ(run.code, 0) << run.output;
  const auto quiet = content_of(folder.path() / "live/output-00000.log");
  EXPECT_THAT(quiet, StartsWith("early\n"));
  EXPECT_THAT(quiet, HasSubstr("last of 0\n"));
  EXPECT_THAT(quiet, HasSubstr("unfinished\n"));
  const auto noisy = content_of(folder.path() / "live/output-00001.log");
  EXPECT_LE(noisy.size(), OutputTail::kMaxBytes);
  EXPECT_GT(noisy.size(), OutputTail::kMaxBytes / 3);
  EXPECT_THAT(noisy, HasSubstr("\n60000\n")) << "although the console does not show it";
  const auto first = std::stoi(noisy);
  EXPECT_THAT(noisy, StartsWith(std::to_string(first) + "\n" + std::to_string(first + 1) + "\n"));
}

TEST(RunLiveFiles, OfEachNodeHaveItsOwnWorkers) {
  const TemporaryFolder folder;
  const auto secret = (folder.path() / "secret").string();
  std::ofstream(secret) << std::string(32, 's');
  fs::permissions(secret, fs::perms(0600));
  fs::create_directories(folder.path() / "live");
  std::ofstream(folder.path() / "live/node-002.json") << "{}";        // of an earlier start with more nodes
  std::ofstream(folder.path() / "live/output-00004.log") << "stale";  // and more ranks
  const auto port = std::to_string(free_port());
  // A node that fails before a worker of the other has noted the folder leaves no file of that other.
  const std::string script =
      "echo rank $RANK; [ $RANK = 3 ] || exec sleep 60; until [ -e \"$1/live/node-000.json\" ]; do sleep 0.05; done; "
      "exit 7";
  std::vector<std::unique_ptr<RankProcess>> nodes;
  for (const char* node : {"0", "1"})
    nodes.push_back(std::make_unique<RankProcess>(
        run_command(with({"-n", "2", "--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1",
                          "--master-port", port, "--secret-file", secret},
                         noting(folder.path(), script))),
        clean_environment()));
  for (auto& node : nodes) EXPECT_EQ(node->wait(60s), 3) << node->output();
  for (int node : {0, 1}) {
    const auto file = json_of(folder.path() / "live" / ("node-00" + std::to_string(node) + ".json"));
    EXPECT_EQ(file["node"], node);
    EXPECT_EQ(file["nodes"], 2);
    EXPECT_EQ(file["state"], "ended");
    ASSERT_EQ(file["workers"].size(), 2u);
    EXPECT_EQ(file["workers"][0]["rank"], 2 * node);
    EXPECT_EQ(file["workers"][1]["local_rank"], 1);
    EXPECT_EQ(file["report"]["culprit"]["rank"], 3);
  }
  const auto culprit = json_of(folder.path() / "live/node-001.json")["workers"][1];
  EXPECT_EQ(culprit["failed"], true);
  EXPECT_EQ(culprit["how"], "exit code 7");
  EXPECT_EQ(content_of(folder.path() / "live/output-00003.log"), "rank 3\n");
  EXPECT_FALSE(fs::exists(folder.path() / "live/node-002.json"));
  EXPECT_FALSE(fs::exists(folder.path() / "live/output-00004.log"));
}

TEST(RunLiveFiles, ShowAWorkerThatEndsWhileOthersRun) {
  const TemporaryFolder folder;
  RankProcess launcher(
      run_command(with({"-n", "2"}, noting(folder.path(), "[ $RANK = 0 ] && exit 0; echo started; exec sleep 60"))),
      clean_environment());
  const auto has_ended = [&] {
    const auto file = json_of(folder.path() / "live/node-000.json");
    return file.is_object() && file["workers"].size() == 2 && file["workers"][0]["state"] == "ended" &&
           file["workers"][0]["failed"] == false && file["workers"][1]["state"] == "running";
  };
  EXPECT_TRUE(eventually(has_ended, 30s)) << content_of(folder.path() / "live/node-000.json");
  launcher.signal(SIGTERM);
  EXPECT_EQ(launcher.wait(60s), 6) << launcher.output();
}

TEST(RunLiveFiles, ThatFillTheDiskCostOnlyThemselves) {
  const TemporaryFolder folder;
  if (::mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=64k") != 0)
    GTEST_SKIP() << "could not run: this user cannot mount a tmpfs";
  const auto run = run_launcher(with({"--local-ranks-filter", "0"}, noting(folder.path(), "seq 1 200000; sleep 2.5")));
  ::umount(folder.path().c_str());
  EXPECT_EQ(run.code, 0) << run.output.substr(0, 2000);
  EXPECT_EQ(lines_after(run.output, "[0] ").size(), 200'000u);
  const auto warning = run.output.find("No space left on device; the job continues without the launcher's live files");
  ASSERT_NE(warning, std::string::npos);
  EXPECT_EQ(run.output.find("No space left on device", warning + 1), std::string::npos) << "one warning";
}

TEST(RunLiveFiles, OfAFolderThatIsNotThereAreDropped) {
  for (const char* folder : {"/proc/no such folder", "", "relative\nand odd"}) {
    const auto run = run_launcher(noting(folder, "echo done"));
    EXPECT_EQ(run.code, 0) << run.output;
    EXPECT_THAT(run.output, HasSubstr("[0] done\n"));
  }
}

}  // namespace
}  // namespace lockstep
