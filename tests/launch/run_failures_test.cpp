// Workers that fail in every way: what the report says, what the others are told, how the launcher exits.

#include <unistd.h>

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/launcher_process.h"
#include "support/send_signal.h"
#include "support/small_memory.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;
using Clock = std::chrono::steady_clock;

std::string host() {
  char name[256] = {};
  ::gethostname(name, sizeof name - 1);
  return name;
}

TEST(RunFailures, ReportsAnExitCodeWithTheLastLinesOfStderr) {
  auto run = run_launcher(
      {"-n", "3", "sh", "-c", "[ $RANK = 1 ] || exec sleep 60; for i in $(seq 30); do echo line $i >&2; done; exit 5"});
  EXPECT_EQ(run.code, 3);
  EXPECT_THAT(run.output, ContainsRegex("lockstep run: rank 1 \\(pid [0-9]+ on " + host() +
                                        "\\) failed first, after [0-9.]+ s: exit code 5\n"));
  auto tail = lines_after(run.output, "    | ");
  ASSERT_EQ(tail.size(), 20u);
  EXPECT_EQ(tail.front(), "line 11");
  EXPECT_EQ(tail.back(), "line 30");
  EXPECT_THAT(run.output, HasSubstr("failed as a consequence: ranks"));
  EXPECT_THAT(run.output, HasSubstr("0 (killed by SIGTERM (Terminated))"));
}

TEST(RunFailures, SaysWhereTheLogsAre) {
  TemporaryFolder folder;
  auto run = run_launcher({"--log-dir", folder.path().string(), "sh", "-c", "exit 1"});
  EXPECT_THAT(run.output, HasSubstr("its output: " + folder.path().string() + "/0/0\n"));
}

TEST(RunFailures, ReportsWhatAnUncaughtExceptionSaid) {
  auto run = run_launcher({"-n", "2", LAUNCHED, "throw", "train.bin"});
  EXPECT_EQ(run.code, 4);
  EXPECT_THAT(run.output, AllOf(HasSubstr("rank 1"), HasSubstr("killed by SIGABRT (Aborted"),
                                HasSubstr("uncaught exception: std::runtime_error: no data in train.bin\n"),
                                HasSubstr("see the exception above")));
}

TEST(RunFailures, NamesAFolderForTemporaryFilesThatDoesNotExist) {
  auto run = run_launcher({"-n", "2", LAUNCHED, "lines", "1"}, {{"TMPDIR", "/nowhere/at/all"}});
  EXPECT_EQ(run.code, 70);
  EXPECT_THAT(run.output, AllOf(HasSubstr("mkdtemp /nowhere/at/all/lockstep-"), HasSubstr("set TMPDIR to a folder"),
                                Not(HasSubstr("was killed"))));
}

TEST(RunFailures, ReportsACrash) {
  auto run = run_launcher({"-n", "2", LAUNCHED, "segfault"});
  EXPECT_EQ(run.code, 4);
  EXPECT_THAT(run.output, AllOf(HasSubstr("rank 1"), HasSubstr("killed by SIGSEGV (Segmentation fault")));
}

TEST(RunFailures, TellsTheOthersBeforeItSendsThemSigterm) {
  for (const char* way : {"exit", "kill"}) {
    auto run = run_launcher({"-n", "3", LAUNCHED, "meet", way});
    EXPECT_EQ(run.code, way == std::string("exit") ? 3 : 4) << run.output;
    for (const char* rank : {"[0] ", "[1] "}) {
      auto lines = lines_after(run.output, rank);
      ASSERT_EQ(lines.size(), 1u) << run.output;
      EXPECT_THAT(lines[0], AllOf(HasSubstr("told before SIGTERM: PeerError: rank 2 (pid "), HasSubstr("is gone")));
    }
    EXPECT_THAT(run.output, HasSubstr("rank 2 (pid "));
    EXPECT_THAT(run.output, HasSubstr("failed first"));
  }
}

TEST(RunFailures, BlamesTheRankThatGaveUpAndNotThoseThatEndedBeforeItsProcessDid) {
  auto run = run_launcher({"-n", "3", LAUNCHED, "meet", "give_up"});
  EXPECT_EQ(run.code, 3);
  EXPECT_EQ(lines_after(run.output, "lockstep run: rank 2 (pid ").size(), 2u) << "first and last line:" << run.output;
  EXPECT_EQ(lines_after(run.output, "lockstep run: rank ").size(), 2u) << run.output;
  EXPECT_THAT(run.output, HasSubstr("message to the ranks: rank 2"));
  EXPECT_THAT(run.output, HasSubstr("gave up: no data"));
}

TEST(RunFailures, ARankThatGaveUpHasFailedAlsoWhenItIsStoppedBeforeItEnds) {
  auto run = run_launcher({"-n", "3", LAUNCHED, "meet", "give_up_and_hang"});
  EXPECT_EQ(run.code, 3);
  EXPECT_THAT(run.output,
              AllOf(ContainsRegex("lockstep run: rank 2 \\(pid [0-9]+ on " + host() +
                                  "\\) failed first, after [0-9.]+ s: stopped with the others .killed by SIGTERM"),
                    HasSubstr("gave up: no data"), HasSubstr("failed as a consequence: ranks")));
}

TEST(RunFailures, ARankThatDiesOfASigtermFromElsewhereWasKilled) {
  auto run = run_launcher({"-n", "3", LAUNCHED, "meet", "die_of_sigterm"});
  EXPECT_EQ(run.code, 4);
  EXPECT_THAT(run.output, ContainsRegex("lockstep run: rank 2 .* failed first, after [0-9.]+ s: killed by SIGTERM"));
}

TEST(RunFailures, BlamesARankThatIsFrozen) {
  auto run = run_launcher({"-n", "2", "--grace", "1", LAUNCHED, "meet", "stop"});
  EXPECT_EQ(run.code, 3);
  EXPECT_THAT(run.output, AllOf(HasSubstr("told: PeerError: rank 1"), HasSubstr("sent no heartbeat for 5"),
                                ContainsRegex("lockstep run: rank 1 .*failed first")));
}

TEST(RunFailures, SaysThatARankWasFrozenHoweverItEndedLater) {
  auto run = run_launcher({"-n", "2", LAUNCHED, "meet", "stop_and_abort"});
  EXPECT_EQ(run.code, 3);
  const auto last = lines_after(run.output, "lockstep run: ").back();
  EXPECT_THAT(last, AllOf(ContainsRegex("rank 1 .* is to blame: stopped answering .ended later: killed by SIGABRT"),
                          HasSubstr("find out what stopped its process"), Not(HasSubstr("gdb"))));
}

TEST(RunFailures, RanksWithTheSameErrorAreNotConsequencesOfTheFirst) {
  auto run = run_launcher({"-n", "3", LAUNCHED, "throw_alike"});
  EXPECT_EQ(run.code, 4);
  EXPECT_THAT(run.output, AllOf(ContainsRegex("lockstep run:   ranks [0-2](-| and )[0-2]: the same error\n"),
                                HasSubstr(" are to blame: "), Not(HasSubstr("consequence"))));
}

TEST(RunFailures, NamesARankThatLeftEarlyWithExitCodeZero) {
  auto run = run_launcher({"-n", "2", LAUNCHED, "meet", "leave"});
  EXPECT_EQ(run.code, 3);
  EXPECT_THAT(run.output,
              AllOf(HasSubstr("[0] told: PeerError: rank 1"), HasSubstr("message to the ranks: rank 1"),
                    ContainsRegex("lockstep run: rank 1 .* failed first, after .*: exit code 0, while other ranks"),
                    HasSubstr("failed as a consequence: rank 0 (exit code 1)")));
  EXPECT_THAT(lines_after(run.output, "lockstep run: ").back(), testing::StartsWith("rank 1 (pid "));
}

TEST(RunFailures, KillsThoseThatDoNotEndWithinTheGraceTime) {
  TemporaryFolder folder;
  const auto begin = Clock::now();
  auto run = run_launcher({"-n", "2", "--grace", "0.3", "sh", "-c",
                           "[ $RANK = 0 ] && { trap '' TERM; touch $FOLDER/deaf; exec sleep 60; }; "
                           "while [ ! -e $FOLDER/deaf ]; do sleep 0.01; done; exit 1"},
                          {{"FOLDER", folder.path().string()}});
  EXPECT_EQ(run.code, 3);
  EXPECT_LT(Clock::now() - begin, 10s);
  EXPECT_THAT(run.output, HasSubstr("0 (killed: it did not exit within the grace period of 0.3 s)"));
}

TEST(RunFailures, ReportsAWorkerThatIsKilled) {
  RankProcess launcher(run_command({"-n", "2", "sh", "-c", "echo pid $$; exec sleep 60"}), clean_environment());
  const int victim = std::stoi(launcher.expect_line("[1] pid ").substr(8));
  ASSERT_TRUE(send_signal(victim, SIGKILL));
  EXPECT_EQ(launcher.wait(), 4);
  EXPECT_THAT(launcher.output(), AllOf(HasSubstr("rank 1 (pid " + std::to_string(victim)),
                                       HasSubstr("killed by SIGKILL (Killed)"), Not(HasSubstr("out of memory"))));
}

TEST(RunFailures, ReportsAKillForWantOfMemoryAsSuch) {
  SmallMemory group(256 << 20);
  if (group.path().empty()) GTEST_SKIP() << "no control group for memory can be made here: run as root";
  RankProcess launcher(
      {"sh", "-c", "echo $$ > " + group.path() + "/cgroup.procs; exec " LOCKSTEP_TOOL " run -n 2 " LAUNCHED " eat"},
      clean_environment());
  EXPECT_EQ(launcher.wait(), 4) << launcher.output();
  EXPECT_THAT(launcher.output(), AllOf(HasSubstr("rank 1"), HasSubstr("killed: out of memory")));
}

// --- restarts

TEST(RunRestarts, StartsAllRanksAgainAsANewGeneration) {
  auto run = run_launcher({"-n", "2", "--max-restarts", "3", "--restart-delay", "0.05", "sh", "-c",
                           "echo generation $LOCKSTEP_RESTART_COUNT; [ $LOCKSTEP_RESTART_COUNT = 2 ] || "
                           "{ [ $RANK = 1 ] && exit 4; exec sleep 60; }"});
  EXPECT_EQ(run.code, 0) << run.output;
  EXPECT_THAT(lines_after(run.output, "[1] "), ElementsAre("generation 0", "generation 1", "generation 2"));
  EXPECT_THAT(run.output, AllOf(HasSubstr("failed: exit code 4; restart 1 of 3 in 0.05 s"),
                                HasSubstr("failed: exit code 4; restart 2 of 3 in 0.1 s")));
}

TEST(RunRestarts, GivesEveryGenerationAStoreOfItsOwnAtThePortItWasGiven) {
  const auto port = std::to_string(free_port());
  auto run = run_launcher(
      {"-n", "2", "--max-restarts", "1", "--restart-delay", "0", "--master-port", port, LAUNCHED, "meet", "exit"});
  EXPECT_EQ(run.code, 3);
  auto lines = lines_after(run.output, "[0] told before SIGTERM: ");
  EXPECT_EQ(lines.size(), 2u) << "the second could join again under the same name:\n" << run.output;
}

TEST(RunRestarts, GivesUpACrashLoopWithTheCount) {
  const auto begin = Clock::now();
  auto run = run_launcher({"--max-restarts", "2", "--restart-delay", "0.1", "sh", "-c", "exit 9"});
  EXPECT_EQ(run.code, 3);
  EXPECT_GE(Clock::now() - begin, 300ms) << "it waits, and longer each time";
  EXPECT_THAT(run.output, HasSubstr("failed 3 times, restarted 2 times: no restart is left"));
}

TEST(RunRestarts, RestartsWhenOneWorkerAloneIsSignalled) {
  RankProcess launcher(run_command({"-n", "2", "--max-restarts", "1", "--restart-delay", "0", "sh", "-c",
                                    "echo pid $$; [ $LOCKSTEP_RESTART_COUNT = 1 ] || exec sleep 60"}),
                       clean_environment());
  ASSERT_TRUE(send_signal(std::stoi(launcher.expect_line("[0] pid ").substr(8)), SIGTERM));
  EXPECT_EQ(launcher.wait(), 0) << launcher.output();
}

}  // namespace
}  // namespace lockstep
