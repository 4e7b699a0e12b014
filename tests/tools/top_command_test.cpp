// `lockstep top` as a process: in a pseudo-terminal, in a pipe, and with files that change meanwhile.

#include <csignal>
#include <regex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/live_folder.h"
#include "support/eventually.h"
#include "support/rank_process.h"
#include "support/send_signal.h"
#include "support/terminal.h"
#include "tools/live_samples.h"

namespace lockstep::top {
namespace {

using live::Json;
using live::rank_json;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

constexpr const char* kEnter = "\033[?1049h\033[?25l";
constexpr const char* kSkippedLinks =
    "; symbolic links below it are not followed: name their targets on the command line\n";
constexpr const char* kLeave = "\033[?25h\033[?1049l";

class TopCommand : public live::LiveFolder {
 protected:
  TopCommand() {
    for (int rank = 0; rank < 4; ++rank) write_fresh(rank);
  }

  /// A file that stays fresh during the test: its clock is ahead.
  void write_fresh(int rank, Json changes = Json::object()) const {
    changes["updated"] = unix_time() + 3600;
    changes["started"] = unix_time() - 60;
    write("live/.new", rank_json(rank, changes).dump());
    std::filesystem::rename(run() / "live/.new", run() / "live" / ("rank-0000" + std::to_string(rank) + ".json"));
  }

  static std::map<std::string, std::string> variables(std::map<std::string, std::string> more = {}) {
    for (const char* name : {"NO_COLOR", "LC_ALL", "LC_CTYPE"}) more.emplace(name, "");
    more.emplace("TERM", "xterm-256color");
    more.emplace("LANG", "C.UTF-8");
    return more;
  }

  struct Ran {
    int code = -1;
    std::string output{}, errors{};
  };

  /// Runs a line of the shell in the parent folder of the run. `top` in it is `lockstep top`.
  Ran shell(const std::string& line) const {
    const auto script = "cd '" + folder_.path().string() + "'; top() { " LOCKSTEP_TOOL " top \"$@\"; }; ( " + line +
                        " ) >.stdout 2>.stderr";
    RankProcess process({"/bin/sh", "-c", script}, {});
    Ran ran;
    ran.code = process.wait();
    ran.output = text_of(".stdout");
    ran.errors = text_of(".stderr");
    return ran;
  }

  std::string text_of(const std::string& name) const {
    std::ifstream file(folder_.path() / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::vector<std::string> command() const { return {LOCKSTEP_TOOL, "top", run().string()}; }

  /// Expects that the process ends in this way, and leaves the terminal as it was.
  static void expect_restored(TerminalProcess& process) {
    EXPECT_EQ(process.wait(), 0) << process.bytes();
    const auto& bytes = process.bytes();
    EXPECT_EQ(bytes.rfind(kEnter), bytes.find(kEnter)) << "entered once";
    ASSERT_NE(bytes.rfind(kLeave), bytes.npos);
    EXPECT_EQ(bytes.rfind(kLeave) + std::string(kLeave).size(), bytes.size()) << "nothing follows";
    EXPECT_TRUE(process.is_usual());
  }
};

TEST_F(TopCommand, RestoresTheTerminalAfterQ) {
  TerminalProcess process(command(), 80, variables());
  process.expect("s sort: rank");
  EXPECT_FALSE(process.is_usual()) << "keys are read one by one";
  EXPECT_THAT(process.bytes(), StartsWith(kEnter));
  process.type("q");
  expect_restored(process);
}

TEST_F(TopCommand, RestoresTheTerminalAfterCtrlCAndSignals) {
  for (const int number : {0, SIGINT, SIGTERM, SIGHUP, SIGQUIT}) {
    TerminalProcess process(command(), 80, variables());
    process.expect("s sort: rank");
    if (number == 0)
      process.type("\003");  // Ctrl-C
    else
      EXPECT_TRUE(send_signal(process.pid(), number));
    expect_restored(process);
  }
}

TEST_F(TopCommand, RestoresTheTerminalWhileItIsStopped) {
  TerminalProcess process(command(), 80, variables());
  process.expect("s sort: rank");
  const size_t before = process.bytes().size();
  process.type("\032");  // Ctrl-Z
  process.expect_after(before, kLeave);
  EXPECT_TRUE(eventually([&] { return process.is_usual(); }));
  const auto is_stopped = [&] {
    std::ifstream file("/proc/" + std::to_string(process.pid()) + "/stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    return text.find(") T ") != text.npos;
  };
  EXPECT_TRUE(eventually(is_stopped));
  EXPECT_TRUE(send_signal(process.pid(), SIGCONT));
  process.expect_after(before, kEnter);
  process.expect_after(process.bytes().size(), "s sort: rank");
  process.type("q");
  EXPECT_EQ(process.wait(), 0);
  EXPECT_TRUE(process.is_usual());
}

TEST_F(TopCommand, ShowsChangesOfTheFiles) {
  TerminalProcess process(command(), 80, variables());
  process.expect("ranks: 4 running");
  write_fresh(1, {{"state", "failed"}, {"failure", {{"kind", "PeerError"}, {"message", "rank 3 is gone"}}}});
  process.expect("PeerError: rank 3 is gone");
  process.expect("ranks: 3 running, 1 failed");
  write("live/rank-00002.json", "{\"form");  // half a file, as of a full disk
  process.expect("its live file cannot be read");
  process.expect("live/rank-00002.json: it is damaged");
  remove_folder(run());
  process.expect("No rank has written a live file yet");
  process.type("q");
  expect_restored(process);
}

TEST_F(TopCommand, FollowsKeysAtOnce) {
  write("live/output-00001.log", "hello from rank 1\n");
  TerminalProcess process(command(), 80, variables());
  process.expect("── \033[0m\033[1mrank 0");
  process.type("\033[B");
  process.expect("hello from rank 1");
  process.type("s");
  process.expect("s sort: state");
  process.type("?");
  process.expect("sort by rank, state, step");
  const size_t before = process.bytes().size();
  process.type("q");  // leaves the help
  process.expect_after(before, "s sort: state");
  process.type("q");
  expect_restored(process);
}

TEST_F(TopCommand, FollowsTheSizeOfTheTerminal) {
  TerminalProcess process(command(), 80, variables());
  process.expect("s sort: rank");
  EXPECT_THAT(process.bytes(), Not(HasSubstr("TIME")));
  process.resize(140);
  process.expect("TIME");
  const size_t before = process.bytes().size();
  process.resize(30, 6);
  process.expect_after(before, "\033[2m1-2 of 4  \033[0m");
  process.type("q");
  expect_restored(process);
}

TEST_F(TopCommand, UsesColoursAndUnicodeOnlyWhereTheyAreWanted) {
  write_fresh(1, {{"state", "failed"}});
  TerminalProcess coloured(command(), 80, variables());
  coloured.expect("s sort: rank");
  coloured.type("q");
  EXPECT_EQ(coloured.wait(), 0);
  EXPECT_THAT(coloured.bytes(), AllOf(HasSubstr("\033[1;31mfailed"), HasSubstr("↑↓")));

  TerminalProcess plain(command(), 80, variables({{"NO_COLOR", "1"}, {"LANG", "C"}}));
  plain.expect("s sort: rank");
  plain.type("q");
  EXPECT_EQ(plain.wait(), 0);
  const auto begin = plain.bytes().find("\033[H"), end = plain.bytes().rfind("\033[J");
  ASSERT_LT(begin, end);
  const auto frames = plain.bytes().substr(begin, end - begin);
  EXPECT_THAT(frames, Not(ContainsRegex("\033\\[[0-9;]*m")));
  for (char letter : frames) EXPECT_LT(static_cast<unsigned char>(letter), 0x80);
}

TEST_F(TopCommand, PrintsOnceOnATerminalWithoutEscapes) {
  TerminalProcess process(command(), 80, variables({{"TERM", "dumb"}}));
  EXPECT_EQ(process.wait(), 0);
  EXPECT_THAT(process.bytes(), AllOf(HasSubstr("ranks: 4 running"), Not(HasSubstr("\033"))));
}

TEST_F(TopCommand, PrintsTheTableOnceWithoutATerminal) {
  for (const char* line : {"top run --once", "top run", "top", "cd run; top ."}) {
    if (std::string(line) == "top") std::filesystem::create_directory_symlink(folder_.path(), folder_.path() / "runs");
    const auto ran = shell(line);
    EXPECT_EQ(ran.code, 0) << line << ran.errors;
    EXPECT_EQ(ran.errors, "") << line;
    EXPECT_THAT(ran.output, AllOf(HasSubstr("ranks: 4 running  batch 50/100\n"),
                                  HasSubstr("\n      3 running    100    320  30%"), Not(HasSubstr("\033"))))
        << line;
  }
}

TEST_F(TopCommand, PrintsJson) {
  const auto ran = shell("top run --json");
  EXPECT_EQ(ran.code, 0) << ran.errors;
  const auto json = Json::parse(ran.output);
  EXPECT_EQ(json.at("run"), "run");
  EXPECT_EQ(json.at("state"), "running");
  EXPECT_EQ(json.at("ranks").size(), 4U);
  EXPECT_EQ(json.at("ranks").at(2).at("rank"), 2);
}

TEST_F(TopCommand, FollowsNoLinkOutOfTheRun) {
  write_fresh(1, {{"host", "secret"}});
  const auto of_file = shell(
      "mv run/live outside; mkdir run/live; cp outside/rank-00000.json run/live; "
      "ln -s ../../outside/rank-00001.json run/live; top run --json");
  EXPECT_EQ(of_file.code, 0) << of_file.errors;
  EXPECT_THAT(of_file.output, AllOf(HasSubstr("live/rank-00001.json: it is a symbolic link, which is not followed"),
                                    Not(HasSubstr("secret"))));
  const auto of_folder = shell("rm -r run/live; ln -s ../outside run/live; touch run/metrics.jsonl; top run");
  EXPECT_EQ(of_folder.code, 1);
  EXPECT_THAT(of_folder.errors, HasSubstr("lockstep top: live: it is a symbolic link, which is not followed"));
  EXPECT_EQ(of_folder.output, "");
  const auto of_run = shell("rm run/live; mv outside run/live; mkdir runs; ln -s ../run runs/link; top; top runs/link");
  EXPECT_THAT(of_run.errors, AllOf(HasSubstr("no run in runs has live files"), HasSubstr(kSkippedLinks)))
      << "found through a link";
  EXPECT_THAT(of_run.output, HasSubstr("runs/link  running")) << "named by the user";
}

TEST_F(TopCommand, SaysThatLinksWereSkipped) {
  const auto expect = [&](const std::string& line, const std::string& name) {
    const auto ran = shell(line);
    EXPECT_EQ(ran.code, 2) << line;
    EXPECT_THAT(ran.errors, AllOf(HasSubstr("no run in " + name + " has live files"), HasSubstr(kSkippedLinks)))
        << line;
  };
  expect("mv run/live outside; ln -s ../outside run/live; top run", "run");
  expect("top .", ".");
  expect("mkdir -p deep/1/2; mv run deep/1/2; top deep", "deep");
  expect("touch deep/1/2/run/metrics.jsonl; top deep", "deep");
}

TEST_F(TopCommand, ShowsWhyThereIsNoOutput) {
  write("live/output-00000.log", "secret\n");
  std::filesystem::rename(run() / "live/output-00000.log", run() / "log");
  std::filesystem::create_symlink("../log", run() / "live/output-00000.log");
  TerminalProcess process(command(), 80, variables());
  process.expect("the output cannot be shown: it is a symbolic link, which is not followed");
  process.type("q");
  expect_restored(process);
  EXPECT_THAT(process.bytes(), Not(HasSubstr("secret")));
}

TEST_F(TopCommand, PrintsNoEscapesInTheNameOfARun) {
  const auto ran =
      shell("run=runs/\"$(printf 'a\\033[31mb')\"; mkdir -p \"$run\"/live; touch \"$run\"/live/node-00000.json; top");
  EXPECT_EQ(ran.code, 1);
  EXPECT_EQ(ran.errors,
            "lockstep top: live/node-00000.json: it is empty\n"
            "lockstep top: runs/ab has no live files that can be read\n");
}

TEST_F(TopCommand, SaysWhatIsWrong) {
  const auto expect = [&](const std::string& line, int code, const std::string& part) {
    const auto ran = shell(line);
    EXPECT_EQ(ran.code, code) << line;
    EXPECT_THAT(ran.errors, AllOf(StartsWith("lockstep"), HasSubstr(part))) << line;
    EXPECT_EQ(ran.output, "") << line;
  };
  expect("top nowhere", 2, "nowhere is not a folder: name the folder of a run");
  expect("top", 2, "there is no folder runs here");
  expect("mkdir empty; top empty", 2, "its TrainingRun\n");
  expect("mkdir done; touch done/summary.json; top done", 1, "done has no live files that can be read");
  expect("top run --twice", 2, "--twice");
  expect("top run > /dev/full", 1, "the output cannot be written");
  write("live/rank-00000.json", "x");
  for (int rank : {1, 2, 3}) std::filesystem::remove(run() / ("live/rank-0000" + std::to_string(rank) + ".json"));
  const auto ran = shell("top run");
  EXPECT_EQ(ran.code, 0);
  EXPECT_THAT(ran.output, HasSubstr("live/rank-00000.json: it is damaged"));
}

}  // namespace
}  // namespace lockstep::top
