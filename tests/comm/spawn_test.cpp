#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <regex>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/rank_process.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

RankProcess program(const std::string& scenario) {
  return {{TEST_RANKS, "spawning", scenario}, {{"TMPDIR", testing::TempDir()}}};
}

std::set<int> pids_in(const std::string& output) {
  std::set<int> pids;
  std::regex pattern("pid ([0-9]+)");
  for (std::sregex_iterator match(output.begin(), output.end(), pattern), end; match != end; ++match)
    pids.insert(std::stoi((*match)[1]));
  return pids;
}

/// Gone, or a zombie that its new parent has yet to reap.
bool is_gone(int pid) {
  if (::kill(pid, 0) != 0) return true;
  std::ifstream stat("/proc/" + std::to_string(pid) + "/stat");
  std::string id, name, state;
  stat >> id >> name >> state;
  return state == "Z" || state.empty();
}

void expect_all_gone(const std::set<int>& pids, std::chrono::milliseconds limit) {
  auto deadline = std::chrono::steady_clock::now() + limit;
  for (int pid : pids) {
    while (!is_gone(pid) && std::chrono::steady_clock::now() < deadline) ::usleep(5000);
    EXPECT_TRUE(is_gone(pid)) << "pid " << pid;
  }
}

TEST(Spawn, RanksAreProcessesThatReduceTogether) {
  auto parent = program("sums");
  parent.expect_line("done", 60s);
  EXPECT_EQ(parent.wait(), 0);
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_THAT(parent.output(), HasSubstr("rank " + std::to_string(rank) + ": sum 1536.000000 pid "));
  auto pids = pids_in(parent.output());
  EXPECT_EQ(pids.size(), 3u);
  EXPECT_FALSE(pids.contains(parent.pid()));
}

TEST(Spawn, WritesNoFileThatAKillCouldLeaveBehind) {
  RankProcess parent({TEST_RANKS, "spawning", "sums"}, {{"TMPDIR", "/nowhere"}});
  parent.expect_line("done", 60s);
  EXPECT_EQ(parent.wait(), 0);
}

TEST(Spawn, OurErrorsKeepTheirKindAndNameTheRank) {
  auto parent = program("throws_usage");
  EXPECT_THAT(parent.expect_line("UsageError", 60s), AllOf(HasSubstr("UsageError: rank 1: broadcast"), HasSubstr("7")));
  EXPECT_EQ(parent.wait(), 3);
}

TEST(Spawn, OtherExceptionsNameTheirType) {
  auto parent = program("throws_foreign");
  EXPECT_THAT(parent.expect_line("Error", 60s), HasSubstr("Error: rank 2: std::out_of_range: no such sample"));
  EXPECT_EQ(parent.wait(), 3);
}

TEST(Spawn, AKilledRankIsNamedWithItsSignal) {
  auto parent = program("is_killed");
  EXPECT_THAT(parent.expect_line("PeerError", 60s),
              AllOf(HasSubstr("rank 1: its process (pid "),
                    HasSubstr("ended before its function returned: killed by SIGKILL (Killed)")));
  EXPECT_EQ(parent.wait(), 3);
}

TEST(Spawn, ARankThatExitsBeforeItsFunctionReturnsIsNamed) {
  auto parent = program("exits");
  EXPECT_THAT(
      parent.expect_line("PeerError", 60s),
      AllOf(HasSubstr("rank 1: its process (pid "), HasSubstr("ended before its function returned: exit code 0")));
  EXPECT_EQ(parent.wait(), 3);
}

TEST(Spawn, ATimeOutNamesThoseStillRunningAndEndsThem) {
  auto parent = program("takes_too_long");
  EXPECT_THAT(parent.expect_line("TimeoutError", 60s),
              AllOf(HasSubstr("rank 1 is still running"), HasSubstr("8000 ms")));
  EXPECT_EQ(parent.wait(), 3);
  expect_all_gone(pids_in(parent.output()), 1s);
}

TEST(Spawn, NoRankOutlivesItsParent) {
  auto parent = program("waits_for_ever");
  for (int rank = 0; rank < 2; ++rank) parent.expect_line("rank ", 60s);
  auto pids = pids_in(parent.output());
  ASSERT_EQ(pids.size(), 2u);
  parent.signal(SIGKILL);
  expect_all_gone(pids, 1s);
}

TEST(Spawn, CallsAreToldApart) {
  auto parent = program("twice");
  parent.expect_line("done", 60s);
  EXPECT_EQ(parent.wait(), 0);
  auto count = [&](const std::string& word) {
    size_t found = 0;
    for (size_t at = 0; (at = parent.output().find(word, at)) != std::string::npos; ++at) ++found;
    return found;
  };
  EXPECT_EQ(count(": first\n"), 2u);
  EXPECT_EQ(count(": second\n"), 3u);
  EXPECT_EQ(count("between\n"), 1u);
}

TEST(Spawn, ARankCannotSpawn) {
  auto parent = program("nested");
  EXPECT_THAT(parent.expect_line("UsageError", 60s), HasSubstr("rank 0: spawn: this process is a rank"));
}

}  // namespace
}  // namespace lockstep
