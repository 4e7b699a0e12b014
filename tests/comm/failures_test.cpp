// Real processes that are killed, stopped, late or wrong, in every phase: what each survivor is told, and how soon.

#include <arpa/inet.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/tcp_store.h>

#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::MatchesRegex;
using Clock = std::chrono::steady_clock;

constexpr int kExitAfterError = 3;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlowness = 10;
#else
constexpr int kSlowness = 1;
#endif
constexpr int kKilled = 128 + SIGKILL;

class Failures : public testing::Test {
 protected:
  /// Ranks, over shared memory or over TEST_BACKEND, that keep what they write, their secret included, in a folder of
  /// this test.
  JobProcesses job(const std::string& scenario, int world_size, std::map<std::string, std::string> variables = {}) {
    variables.emplace("TEST_BACKEND", backend());
    variables.emplace("XDG_STATE_HOME", folder_.path().string());
    variables.emplace("LOCKSTEP_FLIGHT_DIR", folder_.path().string());
    return {FAILING_RANK, world_size, {scenario}, std::move(variables)};
  }

  static std::string backend() {
    const char* chosen = std::getenv("TEST_BACKEND");
    return chosen ? chosen : "shm";
  }

  TemporaryFolder folder_;
};

std::string who(JobProcesses& job, int rank) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(job[rank].pid()) + " on " + host + ")";
}

/// Every rank but one ends with an error of this kind that says all this, and soon.
template <class... Parts>
void expect_survivors_told(JobProcesses& job, int victim, const std::string& kind, std::chrono::milliseconds limit,
                           const Parts&... parts) {
  auto begin = Clock::now();
  for (int rank = 0; rank < job.size(); ++rank) {
    if (rank == victim) continue;
    SCOPED_TRACE("rank " + std::to_string(rank));
    auto line = job[rank].expect_line(kind, 60s);
    auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin);
    std::string me = "rank " + std::to_string(rank);
    EXPECT_THAT(line, AllOf(AnyOf(HasSubstr(me + ":"), HasSubstr("(" + me + " of the job):")), HasSubstr(parts)...));
    EXPECT_LT(took, limit * kSlowness) << line;
  }
  for (int rank = 0; rank < job.size(); ++rank)
    if (rank != victim) {
      EXPECT_EQ(job[rank].wait(), kExitAfterError);
    }
}

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
  auto ranks = job("mixed_calls", 3, {{"TEST_CALLS", count ? count : "20000"}, {"OMP_NUM_THREADS", "1"}});
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

TEST_F(Failures, ARankKilledWhileOthersWaitForAMessageIsNamedWithinASecond) {
  auto ranks = job("messages", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[2].signal(SIGKILL);
  expect_survivors_told(ranks, 2, "PeerError", 1s, who(ranks, 2) + " is gone", "recv");
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

TEST_F(Failures, ARankKilledDuringTheRollCallIsNamedAtOnce) {
  auto ranks = job("joins_only", 3);
  ranks.start(0);
  ranks.start(1);
  // A look at the job's own store tells when rank 1 has enrolled; rank 2 never comes.
  ::setenv("XDG_STATE_HOME", folder_.path().c_str(), 1);
  TcpStore({.port = ranks.port(), .timeout = 30s}).wait({"start/0/roll_call/0/0", "start/0/roll_call/0/1"}, 30s);
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
    expect_survivors_told(ranks, victim, "PeerError", 4s, who(ranks, victim), "has not been heard of for", "stopped");
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
  expect_survivors_told(ranks, 1, "PeerError", 8s, who(ranks, 1), "has not been heard of for 5");
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
  expect_survivors_told(ranks, 1, "PeerError", 1s, who(ranks, 1) + " is gone", "ended without destroying");
  EXPECT_EQ(ranks[1].wait(), 0);
}

TEST_F(Failures, ARankThatLeavesInOrderIsNamedByThoseWhoStillNeedIt) {
  auto ranks = job("returns_early", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  ranks[1].say("now");
  expect_survivors_told(ranks, 1, "PeerError", 1s,
                        who(ranks, 1) + " has left group 'world' after 1 calls, and this is call 2");
  EXPECT_EQ(ranks[1].wait(), 0);
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
                        "its last was barrier(), call 1 of group 'world'");
}

TEST_F(Failures, RanksThatDisagreeAreAllToldBothSides) {
  auto ranks = job("other_shapes", 3);
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) ranks[rank].expect_line("running");
  constexpr int kNobody = -1;
  expect_survivors_told(ranks, kNobody, "MismatchError", 2s, who(ranks, 1) + " makes all_reduce(sum, Float[5]) at",
                        "makes all_reduce(sum, Float[4]) at", "failing_rank.cpp:", "the number of elements differs");
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

// --- joining goes wrong

TEST_F(Failures, EveryRankThatCameSaysWhoDidNot) {
  auto ranks = job("joins_only", 4, {{"TEST_TIMEOUT_MS", "1500"}});
  ranks.start(0);
  ranks.start(2);
  for (int rank : {0, 2})
    EXPECT_THAT(ranks[rank].expect_line("TimeoutError"),
                AllOf(HasSubstr("2 of 4 ranks joined within"), HasSubstr("missing: rank 1 and 3")));
}

TEST_F(Failures, AMissingHostOfTheStoreIsSaidToBeMissing) {
  auto ranks = job("joins_only", 2, {{"TEST_TIMEOUT_MS", "800"}});
  ranks.start(1);
  EXPECT_THAT(ranks[1].expect_line("TimeoutError"),
              AllOf(HasSubstr("rank 1: missing: the host of the job's store (rank 0"),
                    HasSubstr("127.0.0.1:" + std::to_string(ranks.port()))));
}

TEST_F(Failures, ADuplicateRankIsRefusedAndTheJobGoesOn) {
  auto ranks = job("counts", 2);
  ranks.start_all();
  for (int rank = 0; rank < 2; ++rank) ranks[rank].expect_line("running");
  RankProcess twin({FAILING_RANK, "joins_only"}, {{"RANK", "1"},
                                                  {"WORLD_SIZE", "2"},
                                                  {"MASTER_ADDR", "127.0.0.1"},
                                                  {"MASTER_PORT", std::to_string(ranks.port())},
                                                  {"TEST_BACKEND", backend()},
                                                  {"XDG_STATE_HOME", folder_.path().string()}});
  EXPECT_THAT(twin.expect_line("MismatchError"),
              AllOf(HasSubstr("pid " + std::to_string(twin.pid())), HasSubstr(who(ranks, 1) + " has already joined")));
  ranks[0].say("enough");
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].output();
}

TEST_F(Failures, AnotherWorldSizeIsRefusedOnBothSides) {
  auto ranks = job("joins_only", 2);
  ranks.start(0);
  ranks.variables()["WORLD_SIZE"] = "3";
  ranks.start(1);
  // Whichever comes second finds out; the first is told what it found.
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_THAT(ranks[rank].expect_line("MismatchError"), AllOf(HasSubstr("world size is "), HasSubstr("WORLD_SIZE"),
                                                                HasSubstr("pid " + std::to_string(ranks[0].pid())),
                                                                HasSubstr("pid " + std::to_string(ranks[1].pid()))));
}

TEST_F(Failures, AProcessOfAnEarlierStartHasNoKey) {
  auto ranks = job("joins_only", 2, {{"TEST_TIMEOUT_MS", "5000"}, {"LOCKSTEP_RESTART_COUNT", "1"}});
  ranks.start(0);
  ranks.variables()["LOCKSTEP_RESTART_COUNT"] = "0";
  ranks.start(1);
  EXPECT_THAT(ranks[1].expect_line("PeerError"), HasSubstr("do not have the same secret"));
  ranks.variables()["LOCKSTEP_RESTART_COUNT"] = "1";
  ranks.start(1);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].output();
}

TEST_F(Failures, AnotherJobsSecretOpensNothing) {
  auto ranks = job("joins_only", 2, {{"TEST_TIMEOUT_MS", "2000"}});
  ranks.start(0);
  TemporaryFolder other;
  ranks.variables()["XDG_STATE_HOME"] = other.path().string();
  ranks.start(1);
  EXPECT_THAT(ranks[1].expect_line("PeerError"), HasSubstr("do not have the same secret"));
  EXPECT_THAT(ranks[0].expect_line("TimeoutError"), HasSubstr("missing: rank 1"));
}

TEST_F(Failures, APortInUseNamesItsOwner) {
  auto ranks = job("joins_only", 2);
  TcpStore owner({.port = ranks.port(), .is_host = true, .secret_file = [&] {
                    auto path = folder_.path() / "secret";
                    std::ofstream(path) << std::string(32, 'x');
                    std::filesystem::permissions(path, std::filesystem::perms::owner_read);
                    return path.string();
                  }()});
  ranks.start(0);
  EXPECT_THAT(ranks[0].expect_line("SystemError"),
              AllOf(HasSubstr(std::to_string(ranks.port())), HasSubstr("pid " + std::to_string(::getpid()))));
}

TEST_F(Failures, BackendThreadsRefusesProcesses) {
  auto ranks = job("joins_only", 2, {{"TEST_BACKEND", "threads"}});
  ranks.start_all();
  EXPECT_THAT(ranks[1].expect_line("UsageError"),
              AllOf(HasSubstr("joins threads of one process"), HasSubstr(std::to_string(ranks[0].pid()))));
  EXPECT_THAT(ranks[0].expect_line("PeerError"), HasSubstr(who(ranks, 1) + " gave up: rank 1: backend threads"));
}

TEST_F(Failures, RunningOutOfDescriptorsIsAClearError) {
  auto ranks = job("without_descriptors", 3, {{"TEST_TIMEOUT_MS", "5000"}});
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[rank].wait(), kExitAfterError) << ranks[rank].output();
  EXPECT_THAT(ranks[0].output() + ranks[1].output() + ranks[2].output(), HasSubstr("Too many open files"));
}

TEST_F(Failures, RunningOutOfThreadsIsAClearError) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can become a user without threads";
  auto ranks =
      job("without_threads", 2, {{"TEST_TIMEOUT_MS", "3000"}, {"XDG_STATE_HOME", "/tmp/lockstep-test-nobody"}});
  ranks.start(0);
  EXPECT_THAT(ranks[0].expect_line("SystemError"), AllOf(HasSubstr("cannot start a thread"), HasSubstr("ulimit -u")));
}

// --- strangers

TEST_F(Failures, StrangersOnThePortDoNotDisturbTheJob) {
  auto ranks = job("counts", 2);
  ranks.start_all();
  for (int rank = 0; rank < 2; ++rank) ranks[rank].expect_line("running");
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(ranks.port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::vector<int> silent;
  for (int i = 0; i < 2000; ++i) {
    int stranger = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    ASSERT_EQ(::connect(stranger, reinterpret_cast<sockaddr*>(&address), sizeof address), 0) << i;
    std::string garbage(i % 7 == 0 ? 3000 : 0, static_cast<char>(i));
    if (!garbage.empty()) (void)!::send(stranger, garbage.data(), garbage.size(), MSG_NOSIGNAL);
    silent.push_back(stranger);
    if (silent.size() < 200) continue;
    for (int old : silent) ::close(old);
    silent.clear();
  }
  ranks[0].say("enough");
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].expect_line("done");
    EXPECT_EQ(ranks[rank].wait(), 0);
  }
  EXPECT_THAT(ranks[0].output(), HasSubstr("turned away"));
  for (int old : silent) ::close(old);
}

}  // namespace
}  // namespace lockstep
