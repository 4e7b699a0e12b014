// A rank that leaves the others in any way: the launcher names that rank, and not the others that fail because of it.

#include <filesystem>
#include <nlohmann/json.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/launcher_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::StartsWith;

struct Way {
  const char* name;
  int exit_code;       // of the launcher
  const char* how;     // rank 1 ended
  const char* told;    // what the ranks were told
  const char* remedy;  // in the last line
  bool catches = false;
};

class Blame : public testing::TestWithParam<Way> {
 protected:
  Finished launch(const std::string& ranks, const std::string& way, std::map<std::string, std::string> variables = {}) {
    variables["LOCKSTEP_FLIGHT_DIR"] = folder_.path().string();
    return run_launcher({"-n", ranks, TEST_RANKS, "leaving_rank", way}, variables);
  }

  TemporaryFolder folder_;
};

TEST_P(Blame, FallsOnTheRankThatLeftAndNotOnThoseThatNeededIt) {
  const auto& way = GetParam();
  const auto run = launch("3", way.name, {{"TEST_CATCHES", way.catches ? "1" : ""}});
  EXPECT_EQ(run.code, way.exit_code) << run.output;
  const auto report = lines_after(run.output, "lockstep run: ");
  ASSERT_GE(report.size(), 2u) << run.output;
  EXPECT_THAT(report.front(), AllOf(StartsWith("rank 1 (pid "), HasSubstr("first, after"), HasSubstr(way.how)));
  EXPECT_THAT(report.back(), AllOf(StartsWith("rank 1 (pid "), HasSubstr(way.how), HasSubstr(way.remedy)));
  const auto told = lines_after(run.output, "lockstep run:   message to the ranks: ");
  EXPECT_THAT(told, testing::ElementsAre(ContainsRegex(way.told))) << run.output;
  EXPECT_THAT(run.output, HasSubstr("failed as a consequence: rank"));
}

const char* const kLeft = "rank 1 .* has left group 'world' after 10 calls";
INSTANTIATE_TEST_SUITE_P(
    Ways, Blame,
    testing::Values(
        Way{"return", 3, "exit code 7", kLeft, "make the same calls"},
        Way{"return", 3, "exit code 7", kLeft, "make the same calls", true},
        Way{"exit", 3, "exit code 0", "rank 1 .* is gone", "make the same calls"},
        Way{"break", 3, "exit code 0", kLeft, "make the same calls"},
        Way{"skip", 3, "exit code 0", "rank 1 .* has left group 'world' after 19 calls", "make the same calls"},
        Way{"straggle", 3, "stopped with the others", "Late: rank 1", "raise the time-out"},
        Way{"shape", 4, "killed by SIGABRT", "rank 1 .* makes all_reduce.avg, Float.5", "make the same calls"},
        Way{"kill", 4, "killed by SIGKILL", "rank 1 .* is gone", "who sent"}),
    [](const auto& info) { return info.param.name + std::string(info.param.catches ? "_caught" : ""); });

TEST_F(Blame, LeavesTheSurvivorsTimeToCatchTheirErrorAndToWriteTheFlightRecorder) {
  const auto run = launch("3", "kill", {{"TEST_CATCHES", "1"}});
  for (const char* rank : {"[0] ", "[2] "})
    EXPECT_THAT(lines_after(run.output, rank), testing::ElementsAre(ContainsRegex("caught: .*rank 1 .* is gone")))
        << run.output;
  EXPECT_THAT(run.output, AllOf(HasSubstr("0 (exit code 9)"), HasSubstr("2 (exit code 9)")));
  int files = 0;
  for (const auto& file : std::filesystem::directory_iterator(folder_.path())) {
    std::ifstream stream(file.path());
    int lines = 0;
    for (std::string line; std::getline(stream, line); ++lines) EXPECT_TRUE(nlohmann::json::accept(line)) << line;
    EXPECT_EQ(lines, 1 + 11) << file.path();
    ++files;
  }
  EXPECT_EQ(files, 2);
}

TEST_F(Blame, FallsOnNobodyWhenARankLeavesThatNobodyNeeds) {
  EXPECT_EQ(launch("3", "none").code, 0);
}

}  // namespace
}  // namespace lockstep
