// Real processes that are killed, stopped, late or wrong, in every phase: what each survivor is told, and how soon.

#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/tcp_store.h>

#include "comm/failing_job.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using Clock = std::chrono::steady_clock;

using Failures = FailingJob;

// --- killed

// Calls of all kinds and sizes on three groups at once, and a rank that is killed at any moment.
TEST_F(Failures, ARankKilledAtAnyMomentIsNamedWithinASecond) {
  const char* count = std::getenv("LOCKSTEP_TEST_RANDOM_KILLS");
  std::mt19937 random(20261115);
  for (int kill = 0; kill < (count ? std::atoi(count) : 5); ++kill) {
    SCOPED_TRACE("kill " + std::to_string(kill));
    auto ranks = job("mixed_calls", 3, {{"TEST_CALLS", "1000000000"}, {"OMP_NUM_THREADS", "1"}});
    ranks.start_all();
    for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
    int victim = static_cast<int>(random() % 3);
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 300000));  // the moment itself
    ranks[victim].signal(SIGKILL);
    expect_survivors_told(ranks, victim, "PeerError", 1s, "rank " + std::to_string(victim) + " (", "is gone");
    if (HasFailure()) return;
  }
}

// No wrong result, no error, and no more memory at the end than near the beginning.
TEST_F(Failures, ManyCallsOnManyGroupsLeaveNothingBehind) {
  const char* count = std::getenv("LOCKSTEP_TEST_MIXED_CALLS");
  const char* usual = backend() == "gloo" ? "4000" : "20000";  // those take about as long
  auto ranks = job("mixed_calls", 3, {{"TEST_CALLS", count ? count : usual}, {"OMP_NUM_THREADS", "1"}});
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) {
    ranks[rank].expect_line("done", 1h);
    EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].output();
  }
}

TEST_F(Failures, ARankKilledBetweenSmallCallsIsNamedWithinASecond) {
  for (int victim : {1, 2}) {
    auto ranks = job("small_calls", 3);
    ranks.start_all();
    for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
    ranks[victim].signal(SIGKILL);
    expect_survivors_told(ranks, victim, "PeerError", 1s, who(ranks, victim) + " is gone", "all_reduce",
                          "Flight recorder: " + folder_.path().string());
    EXPECT_EQ(ranks[victim].wait(), kKilled);
  }
}

TEST_F(Failures, ARankKilledInTheMiddleOfALargeCallIsNamedWithinASecond) {
  auto ranks = job("large_calls", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[1].signal(SIGKILL);
  expect_survivors_told(ranks, 1, "PeerError", 1s, who(ranks, 1) + " is gone", "all_reduce(avg, Float[33554432])");
}

TEST_F(Failures, ARankKilledWhileTrainingIsNamedWithinASecond) {
  for (auto delay : {0ms, 3ms, 7ms, 11ms}) {  // somewhere in forward, backward, a reduction or a step
    auto ranks = job("training", 3, {{"OMP_NUM_THREADS", "1"}});
    ranks.start_all();
    for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
    std::this_thread::sleep_for(delay);
    ranks[2].signal(SIGKILL);
    expect_survivors_told(ranks, 2, "PeerError", 1s, who(ranks, 2) + " is gone");
  }
}

TEST_F(Failures, ARankKilledWhileItTrainsAShareOfTheStateIsNamed) {
  const auto limit = backend() == "nccl" ? 2s : 1s;  // there the step is a graph, which must end and go, too
  for (auto delay : {0ms, 7ms}) {                    // somewhere in a step
    auto ranks = job("captured_training", 3, {{"OMP_NUM_THREADS", "1"}});
    ranks.start_all();
    for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
    std::this_thread::sleep_for(delay);
    ranks[2].signal(SIGKILL);
    expect_survivors_told(ranks, 2, "PeerError", limit, who(ranks, 2) + " is gone");
  }
}

TEST_F(Failures, ARankKilledWhileOthersWaitForAMessageIsNamedWithinASecond) {
  auto ranks = job("messages", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[2].signal(SIGKILL);
  expect_survivors_told(ranks, 2, "PeerError", 1s, who(ranks, 2) + " is gone", "recv");
}

TEST_F(Failures, ARankKilledWhileOthersReadAStreamIsNamedWithinASecond) {
  for (auto delay : {0ms, 3ms, 7ms}) {  // somewhere in a step of the loop
    auto ranks = job("reads_a_stream", 3, {{"OMP_NUM_THREADS", "1"}});
    ranks.start_all();
    for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
    std::this_thread::sleep_for(delay);
    ranks[1].signal(SIGKILL);
    for (int rank : {0, 2}) EXPECT_EQ(ranks[rank].expect_line("left "), "left 0") << "workers of rank " << rank;
    expect_survivors_told(ranks, 1, "PeerError", 1s, who(ranks, 1) + " is gone");
  }
}

// All survivors name the same rank.
TEST_F(Failures, OneOfSeveralRanksKilledAtOnceIsNamed) {
  for (const std::vector<int>& victims : {std::vector{1, 3}, std::vector{2, 1, 3}, std::vector{0, 2}}) {
    SCOPED_TRACE(testing::PrintToString(victims));
    for (const char* scenario : {"small_calls", "training"}) {
      SCOPED_TRACE(scenario);
      auto ranks = job(scenario, 5, {{"OMP_NUM_THREADS", "1"}});
      ranks.start_all();
      for (int rank = 0; rank < 5; ++rank) ranks[rank].expect_line("running");
      for (int victim : victims) ranks[victim].signal(SIGKILL);
      std::vector<testing::Matcher<std::string>> names;
      for (int victim : victims) names.push_back(HasSubstr(who(ranks, victim)));
      std::set<std::string> culprits;
      for (int rank = 0; rank < 5; ++rank) {
        if (std::find(victims.begin(), victims.end(), rank) != victims.end()) {
          EXPECT_EQ(ranks[rank].wait(), kKilled);
          continue;
        }
        const auto line = ranks[rank].expect_line("PeerError", 60s);
        EXPECT_THAT(line, AllOf(HasSubstr("rank " + std::to_string(rank) + ": "), HasSubstr(" is gone"),
                                testing::AnyOfArray(names)));
        culprits.insert(line.substr(line.rfind("[culprit: ")));
        EXPECT_EQ(ranks[rank].wait(), kExitAfterError) << ranks[rank].output();
      }
      if (victims[0] != 0) {  // who hosts the store, from which the ranks know the first cause
        EXPECT_EQ(culprits.size(), 1u) << testing::PrintToString(culprits);
      }
    }
  }
}

TEST_F(Failures, TheHostOfTheStoreIsNamedWhenItIsKilled) {
  auto ranks = job("small_calls", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[0].signal(SIGKILL);
  expect_survivors_told(ranks, 0, "PeerError", 1s, who(ranks, 0) + ", which hosts the job's store, is gone");
}

TEST_F(Failures, ARankThatMadeNoCallWhenAnotherDiedIsToldAtItsNext) {
  auto ranks = job("waits_between_calls", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("idle");
  ranks[2].signal(SIGKILL);
  ranks[2].wait();
  ranks[0].say("go on");
  ranks[1].say("go on");
  expect_survivors_told(ranks, 2, "PeerError", 1s, who(ranks, 2) + " is gone");
}

TEST_F(Failures, ARankKilledDuringTheWaitForAllRanksIsNamedAtOnce) {
  auto ranks = job("joins_only", 3);
  ranks.start(0);
  ranks.start(1);
  // A look at the job's own store tells when rank 1 has joined; rank 2 never comes.
  ::setenv("XDG_STATE_HOME", folder_.path().c_str(), 1);
  TcpStore({.port = ranks.port(), .timeout = 30s}).wait({"start/0/join_request/0/0", "start/0/join_request/0/1"}, 30s);
  ::unsetenv("XDG_STATE_HOME");
  auto begin = Clock::now();
  ranks[1].signal(SIGKILL);
  EXPECT_THAT(ranks[0].expect_line("PeerError"), HasSubstr(who(ranks, 1) + " is gone"));
  EXPECT_LT(Clock::now() - begin, 1s);
  EXPECT_EQ(ranks[0].wait(), kExitAfterError);
}

TEST_F(Failures, ARankKilledWhileTheBackendConnectsIsNamedAtOnce) {
  auto ranks = job("stops_while_connecting", 4, {{"TEST_BACKEND", "slow"}});
  ranks.start_all();
  ranks[1].expect_line("published");
  for (int rank : {0, 2, 3}) ranks[rank].expect_line("connecting");
  ranks[1].signal(SIGKILL);
  expect_survivors_told(ranks, 1, "PeerError", 1s, who(ranks, 1) + " is gone");
}

TEST_F(Failures, RanksThatMeetInAFileAreWatchedToo) {
  auto ranks = job("small_calls", 3,
                   {{"LOCKSTEP_INIT_METHOD", "file://" + (folder_.path() / "store").string()},
                    {"MASTER_ADDR", ""},
                    {"MASTER_PORT", ""}});
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "store")) << "the file is for meeting only";
  ranks[1].signal(SIGKILL);
  expect_survivors_told(ranks, 1, "PeerError", 1s, who(ranks, 1) + " is gone");
}

// --- frozen

TEST_F(Failures, AFrozenRankIsNamedAfterTheHeartbeatLimit) {
  for (int victim : {1, 0}) {
    auto ranks = job("small_calls", 3, {{"TEST_HEARTBEAT_MS", "1500"}});
    ranks.start_all();
    for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
    auto begin = Clock::now();
    ranks[victim].signal(SIGSTOP);
    int survivor = victim == 0 ? 1 : 0;
    expect_survivors_told(ranks, victim, "PeerError", 4s, who(ranks, victim), "sent no heartbeat for", "stopped");
    EXPECT_GT(Clock::now() - begin, 1300ms) << ranks[survivor].output();
  }
}

// Five seconds by default, not the five minutes of the time-out.
TEST_F(Failures, TheHeartbeatLimitIsFiveSeconds) {
  auto ranks = job("waits_between_calls", 2);
  ranks.start_all();
  for (int rank = 0; rank < 2; ++rank) ranks[rank].expect_line("idle");
  ranks[0].say("go on");
  auto begin = Clock::now();
  ranks[1].signal(SIGSTOP);
  expect_survivors_told(ranks, 1, "PeerError", 8s, who(ranks, 1), "sent no heartbeat for 5");
  EXPECT_GT(Clock::now() - begin, 4s);
}

/// Stops every thread of a process as a debugger does, until it goes.
class Debugger {
 public:
  explicit Debugger(int pid) {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/task")) {
      int thread = std::stoi(entry.path().filename());
      if (::ptrace(PTRACE_SEIZE, thread, nullptr, nullptr) != 0) continue;
      ::ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr);
      ::waitpid(thread, nullptr, __WALL);
      threads_.push_back(thread);
    }
  }
  ~Debugger() {
    for (int thread : threads_) ::ptrace(PTRACE_DETACH, thread, nullptr, nullptr);
  }
  bool holds() const { return !threads_.empty(); }

 private:
  std::vector<int> threads_;
};

TEST_F(Failures, ARankInADebuggerMayBeSilent) {
  for (int debugged : {1, 0}) {
    auto ranks = job("counts", 2, {{"TEST_HEARTBEAT_MS", "600"}});
    ranks.start_all();
    for (int rank = 0; rank < 2; ++rank) ranks[rank].expect_line("running");
    {
      Debugger debugger(ranks[debugged].pid());
      if (!debugger.holds()) GTEST_SKIP() << "this machine lets nobody trace a process";
      std::this_thread::sleep_for(2500ms);  // what is tested is that nothing happens for so long
    }
    ranks[0].say("enough");
    for (int rank = 0; rank < 2; ++rank) {
      ranks[rank].expect_line("done");
      EXPECT_EQ(ranks[rank].wait(), 0);
    }
  }
}

// --- ended otherwise

TEST_F(Failures, ARankThatThrowsTakesTheOthersAlongByName) {
  auto ranks = job("throws", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[1].say("now");
  expect_survivors_told(ranks, 1, "PeerError", 1s, who(ranks, 1) + " gave up: an exception ended its work");
  EXPECT_THAT(ranks[1].expect_line("other"), HasSubstr("out of luck"));
}

TEST_F(Failures, ARankThatExitsInTheMiddleIsNamed) {
  auto ranks = job("exits_early", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[1].say("now");
  expect_survivors_told(ranks, 1, "PeerError", 1s, who(ranks, 1) + " is gone", "exited without destroying");
  EXPECT_EQ(ranks[1].wait(), 0);
}

TEST_F(Failures, ARankThatLeavesInOrderIsNamedByThoseWhoStillNeedIt) {
  auto ranks = job("returns_early", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[1].say("now");
  expect_survivors_told(ranks, 1, "PeerError", 1s,
                        who(ranks, 1) + " has left group 'world' after 1 calls, but this is call 2");
  EXPECT_EQ(ranks[1].wait(), 0);
}

TEST_F(Failures, ARankThatLeavesInOrderIsNamedAlsoWhenAnotherHasGivenUpForIt) {
  auto ranks = job("returns_early", 3, {{"TEST_LATE_RANK", "2"}});
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[1].say("now");
  const auto left = who(ranks, 1) + " has left group 'world' after 1 calls, but this is call 2";
  EXPECT_THAT(ranks[0].expect_line("PeerError"), HasSubstr(left));
  EXPECT_EQ(ranks[0].wait(), kExitAfterError);
  ranks[2].say("now");
  EXPECT_THAT(ranks[2].expect_line("PeerError"), HasSubstr(left));
}

TEST_F(Failures, ARankMayLeaveWhenItHasDoneItsPart) {
  auto ranks = job("leaves_after_its_part", 3);
  ranks.start_all();
  bool waits_for_all = backend() == "shm";  // in shared memory nobody goes before all have come
  if (waits_for_all) ranks[2].say("go on");
  ranks[1].expect_line("left");
  if (!waits_for_all) ranks[2].say("go on");
  for (int rank : {2, 0}) {
    ranks[rank].expect_line("done");
    EXPECT_EQ(ranks[rank].wait(), 0);
  }
  ranks[1].say("go on");
  EXPECT_EQ(ranks[1].wait(), 0);
}

// --- late, or different

TEST_F(Failures, AStragglerIsNamedWithWhatItDoesWhenTimeIsUp) {
  auto ranks = job("straggler", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  expect_survivors_told(ranks, 1, "TimeoutError", 4s, "all_reduce(sum, Float[16]), call 2 of group 'world' at ",
                        "failing_rank.cpp:", "did not finish within 1500 ms",
                        "Late: " + who(ranks, 1) + ", which is outside of any call for ",
                        "its last call was barrier(), call 1 of group 'world'");
}

TEST_F(Failures, AStragglerInTheFirstCallOfItsKindIsNamed) {
  auto ranks = job("straggler_in_an_exchange", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  expect_survivors_told(ranks, 1, "TimeoutError", 4s, "all_to_all(", "did not finish within 1500 ms",
                        "Late: " + who(ranks, 1));
}

TEST_F(Failures, RanksThatDisagreeAreAllToldBothSides) {
  auto ranks = job("other_shapes", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  constexpr int kNobody = -1;
  expect_survivors_told(ranks, kNobody, "MismatchError", 2s, who(ranks, 1) + " makes all_reduce(sum, Float[5]) at",
                        "makes all_reduce(sum, Float[4]) at", "failing_rank.cpp:", "the number of elements differs");
}

/// Over nccl alone.
class SharedGpu : public FailingJob {};

TEST_F(SharedGpu, IsRefusedOnBothRanks) {
  auto ranks = job("joins_only", 2, {{"TEST_ONE_HOST", "1"}});
  ranks.start_all();
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_THAT(ranks[rank].expect_line("UsageError", 60s),
                testing::AllOf(HasSubstr("ranks 0 and 1 have the same GPU"),
                               HasSubstr("start at most one rank per GPU on each host"), HasSubstr(".device = cpu")));
    EXPECT_EQ(ranks[rank].wait(), kExitAfterError);
  }
}

TEST_F(Failures, ARankThatForgetsToMakeAGroupIsNamed) {
  auto ranks = job("forgets_a_group", 3);
  ranks.start_all();
  constexpr int kNobody = -1;
  expect_survivors_told(ranks, kNobody, "MismatchError", 5s, who(ranks, 1) + " makes barrier() at",
                        "makes new_group(backend " + backend(), "ranks {0, 2}");
}

TEST_F(Failures, AMonitoredBarrierNamesWhoIsMissing) {
  auto ranks = job("barrier_with_names", 3);
  ranks.start_all();
  for (int rank : {0, 2}) {
    auto line = ranks[rank].expect_line("TimeoutError");
    EXPECT_THAT(line, AllOf(HasSubstr("monitored_barrier"), HasSubstr("1000 ms"), HasSubstr("Late: " + who(ranks, 1))));
    EXPECT_THAT(line, testing::Not(HasSubstr(who(ranks, 0)))) << "it came";
  }
  ranks[1].say("go on");
  EXPECT_THAT(ranks[1].expect_line("TimeoutError"), HasSubstr("monitored_barrier")) << "it came too late";
  for (int rank = 0; rank < 3; ++rank) ranks[rank].say("the group still works");
  for (int rank = 0; rank < 3; ++rank) {
    ranks[rank].expect_line("done");
    EXPECT_EQ(ranks[rank].wait(), 0);
  }
}

}  // namespace
}  // namespace lockstep
