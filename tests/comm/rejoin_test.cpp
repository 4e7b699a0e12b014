// Ranks that destroy their group and join again, in one process: at the launcher's store, which outlives the group, and
// at stores that rank 0 hosts.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/launcher_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;
using Clock = std::chrono::steady_clock;

class Rejoin : public testing::Test {
 protected:
  std::map<std::string, std::string> variables() const {
    return {{"TEST_BACKEND", "gloo"},
            {"XDG_STATE_HOME", folder_.path().string()},
            {"LOCKSTEP_FLIGHT_DIR", folder_.path().string()}};
  }

  Finished launch(const std::string& scenario, const std::string& timeout_ms = "30000") {
    auto more = variables();
    more["TEST_TIMEOUT_MS"] = timeout_ms;
    return run_launcher({"-n", "2", FAILING_RANK, scenario}, more);
  }

  TemporaryFolder folder_;
};

TEST_F(Rejoin, WorksAtTheStoreOfTheLauncher) {
  const auto ran = launch("joins_again");
  EXPECT_EQ(ran.code, 0) << ran.output;
  for (const char* rank : {"[0] ", "[1] "})
    EXPECT_THAT(lines_after(ran.output, rank), testing::ElementsAre("join 1: mean 1.5", "join 2: mean 1.5",
                                                                    "join 3: mean 1.5", "join 4: mean 1.5", "done"));
}

TEST_F(Rejoin, WorksAtStoresThatRankZeroHosts) {
  JobProcesses job(FAILING_RANK, 3, {"joins_again"}, variables());
  job.start_all();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_THAT(job[rank].expect_line("join 4"), HasSubstr("mean 2.0")) << job[rank].output();
    EXPECT_EQ(job[rank].wait(), 0) << job[rank].output();
  }
}

TEST_F(Rejoin, IsNotDisturbedByOneThatLeavesTheFirstGroupLate) {
  const auto ran = launch("leaves_late");
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, AllOf(HasSubstr("[0] second: mean 1.5"), HasSubstr("[1] second: mean 1.5")));
}

TEST_F(Rejoin, KnowsNothingOfWhatBrokeTheFirstGroup) {
  const auto ran = launch("breaks_and_joins_again");
  EXPECT_EQ(ran.code, 3);
  EXPECT_THAT(ran.output, AllOf(HasSubstr("[0] first: rank 0: all_reduce"), HasSubstr("[1] second: mean 1.5"),
                                ContainsRegex("message to the ranks: rank 1 .* gave up: an exception ended its work")));
  EXPECT_THAT(lines_after(ran.output, "[0] PeerError"), testing::ElementsAre(Not(HasSubstr("first"))));
}

TEST_F(Rejoin, ReportsARankThatDiesBetweenTwoJoins) {
  const auto begin = Clock::now();
  const auto ran = launch("dies_between_two_joins");
  EXPECT_LT(Clock::now() - begin, 15s);
  EXPECT_EQ(ran.code, 4);
  EXPECT_THAT(ran.output, ContainsRegex("lockstep run: rank 1 \\(pid [0-9]+ on .*\\) failed first.*killed by SIGKILL"));
  EXPECT_THAT(ran.output, ContainsRegex("\\[0\\] PeerError: rank 0: .*rank 1 .*has failed: killed by SIGKILL"));
}

TEST_F(Rejoin, SaysWhoHasNotJoinedAsOften) {
  const auto ran = launch("joins_once_too_few", "1500");
  EXPECT_EQ(ran.code, 3);
  EXPECT_THAT(ran.output, HasSubstr("[0] TimeoutError: rank 0: 1 of 2 ranks joined"));
  EXPECT_THAT(ran.output, HasSubstr("missing: rank 1. They took part in join 1 but not in join 2: call"));
  const auto report = lines_after(ran.output, "lockstep run: ");
  ASSERT_FALSE(report.empty());
  EXPECT_THAT(report.front(), testing::StartsWith("rank 1 (pid ")) << "rank 0 gave up because of it";
}

TEST_F(Rejoin, SaysThatRankZeroHasNotLeftYet) {
  auto more = variables();
  more["TEST_TIMEOUT_MS"] = "1500";
  JobProcesses job(FAILING_RANK, 2, {"joins_again_without_rank_zero"}, more);
  job.start_all();
  EXPECT_THAT(job[1].expect_line("TimeoutError"), AllOf(HasSubstr("rank 1: this process has joined at 127.0.0.1:"),
                                                        HasSubstr("destroy the group on rank 0")));
}

}  // namespace
}  // namespace lockstep
