// Ranks that mpirun starts, over MPI: who may take part, what survivors are told, and how programs end.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/failing_job.h"
#include "launch/launcher_process.h"
#include "support/send_signal.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

class Mpi : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("mpirun --version 2>/dev/null | grep -q 'Open MPI'") != 0)
      GTEST_SKIP() << "Open MPI's mpirun is not installed (apt-get install openmpi-bin)";
  }

  std::map<std::string, std::string> variables() const {
    return clean_environment({{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                              {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                              {"XDG_STATE_HOME", folder_.path().string()},
                              {"LOCKSTEP_FLIGHT_DIR", folder_.path().string()},
                              {"TEST_BACKEND", "mpi"},
                              {"TEST_HEARTBEAT_MS", "1500"},
                              {"NO_COLOR", "1"}});
  }

  /// Each rank says "pid RANK PID" first.
  std::unique_ptr<RankProcess> start(int ranks, const std::vector<std::string>& command,
                                     const std::vector<std::string>& options = {}) const {
    std::vector<std::string> whole{"mpirun", "--oversubscribe", "--bind-to", "none", "-n", std::to_string(ranks)};
    whole.insert(whole.end(), options.begin(), options.end());
    whole.insert(whole.end(), {"sh", "-c", "echo pid $OMPI_COMM_WORLD_RANK $$; exec \"$0\" \"$@\""});
    whole.insert(whole.end(), command.begin(), command.end());
    return std::make_unique<RankProcess>(whole, variables());
  }

  Finished run(int ranks, const std::vector<std::string>& command, const std::vector<std::string>& options = {}) const {
    auto process = start(ranks, command, options);
    const int code = process->wait(60s);
    return {code, process->output()};
  }

  TemporaryFolder folder_;
};

int count_of(const std::string& output, const std::string& beginning) {
  return static_cast<int>(lines_after(output, beginning).size());
}

int pid_of(const RankProcess& job, int rank) {
  const auto said = lines_after(job.output(), "pid " + std::to_string(rank) + " ");
  return said.empty() ? -1 : std::atoi(said.front().c_str());
}

void await_all_running(RankProcess& job, int ranks) {
  for (int rank = 0; rank < ranks; ++rank) job.expect_line("running");
}

// mpirun ends the others when a rank is gone. Only with this it does not, and all of them can be heard.
const std::vector<std::string> kGoOn{"--enable-recovery"};

// --- who may take part

TEST_F(Mpi, ProcessesThatMpirunDidNotStartAreToldHow) {
  const auto ran = run_launcher({"--standalone", "-n", "2", FAILING_RANK, "sums"}, variables());
  EXPECT_NE(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, ContainsRegex("UsageError: rank [01]: .*start the job with mpirun -n 2 PROGRAM"));
}

TEST_F(Mpi, RanksThatShareAProcessOfMpirunAreRefused) {
  const auto ran = run(1, {LOCKSTEP_TOOL, "run", "--standalone", "-n", "2", FAILING_RANK, "sums"});
  EXPECT_NE(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, HasSubstr("ranks 0 and 1 are both process 0 of mpirun"));
}

TEST_F(Mpi, RanksNeedNotBeInTheOrderOfMpis) {
  const std::string reversed =
      "export RANK=$((2 - OMPI_COMM_WORLD_RANK)) LOCAL_RANK=$((2 - OMPI_COMM_WORLD_RANK)) WORLD_SIZE=3 "
      "LOCAL_WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=" +
      std::to_string(free_port()) + "; exec \"$0\" leaves_after_its_part < /dev/null";
  const auto ran = run(3, {"sh", "-c", reversed, FAILING_RANK});
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_EQ(count_of(ran.output, "done"), 3) << ran.output;
}

TEST_F(Mpi, AProgramMayBeginMpiItselfAndIsNotDisturbed) {
  const auto ran = run(3, {TEST_RANKS, "mpi_rank", "began_mpi_itself"});
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_EQ(count_of(ran.output, "done"), 3) << ran.output;
}

TEST_F(Mpi, AForkedChildIsRefusedAndItsParentGoesOn) {
  const auto ran = run(2, {FAILING_RANK, "forks"});
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_EQ(count_of(ran.output, "done"), 2) << ran.output;
}

TEST_F(Mpi, AProgramThatBeganMpiWithoutThreadsIsToldHow) {
  const auto ran = run(2, {TEST_RANKS, "mpi_rank", "began_mpi_without_threads"}, kGoOn);
  EXPECT_THAT(ran.output, ContainsRegex("UsageError: rank [01]: .*pass it to MPI_Init_thread"));
}

TEST_F(Mpi, AProgramThatHasEndedMpiIsToldSo) {
  const auto ran = run(2, {TEST_RANKS, "mpi_rank", "ended_mpi"}, kGoOn);
  EXPECT_THAT(ran.output, ContainsRegex("UsageError: rank [01]: .*MPI_Finalize was called"));
}

TEST_F(Mpi, AGroupOfSomeBeforeAllHaveBegunMpiTimesOutWithTheReason) {
  const auto ran = run(3, {TEST_RANKS, "mpi_rank", "only_some_use_mpi"});
  EXPECT_NE(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, AllOf(HasSubstr("MPI_Init_thread did not return within 1500 ms"),
                                HasSubstr("put all of them into a group of backend 'mpi'")));
}

// --- what is sent

TEST_F(Mpi, AMessageMovesWhileItsSenderWaitsForSomethingElse) {
  const auto ran = run(2, {TEST_RANKS, "mpi_rank", "message_while_the_sender_waits_elsewhere"},
                       {"--mca", "btl_vader_single_copy_mechanism", "none"});
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_EQ(count_of(ran.output, "done"), 2) << ran.output;
}

TEST_F(Mpi, AReceiveThatIsDroppedDisturbsNothing) {
  const auto ran = run(2, {TEST_RANKS, "mpi_rank", "dropped_message"});
  EXPECT_EQ(ran.code, 0) << ran.output;
  EXPECT_EQ(count_of(ran.output, "done"), 2) << ran.output;
}

TEST_F(Mpi, TagsThatMpiHasNoRoomForAreRefused) {
  const auto ran = run(2, {TEST_RANKS, "mpi_rank", "tag_too_large"}, kGoOn);
  EXPECT_THAT(ran.output, ContainsRegex("backend 'mpi' supports tags from 0 to [0-9]+, but this tag is 65536"));
}

TEST_F(Mpi, DataDoesNotMoveBetweenRanksThatMakeDifferentCalls) {
  for (const char* scenario : {"messages_of_other_dtypes", "broadcasts_of_other_roots"}) {
    const auto ran = run(2, {TEST_RANKS, "mpi_rank", scenario});
    EXPECT_EQ(count_of(ran.output, "MismatchError"), 2) << ran.output;
    EXPECT_EQ(count_of(ran.output, "done"), 2) << ran.output;
    EXPECT_EQ(ran.code, 0) << "a program that goes on after an error ends well: " << ran.output;
  }
}

// --- failures

TEST_F(Mpi, ARankThatIsKilledIsNamed) {
  for (const char* scenario : {"small_calls", "large_calls", "messages"}) {
    auto job = start(3, {FAILING_RANK, scenario}, kGoOn);
    await_all_running(*job, 3);
    const auto victim = pid_of(*job, 1);
    ASSERT_TRUE(send_signal(victim, SIGKILL));
    const auto begin = Clock::now();
    for (int survivor = 0; survivor < 2; ++survivor)
      EXPECT_THAT(job->expect_line("PeerError"), HasSubstr("rank 1 (pid " + std::to_string(victim)));
    EXPECT_LT(Clock::now() - begin, 2s * kSlowness);
    job->wait(60s);
  }
}

TEST_F(Mpi, MpirunEndsAllWhenARankIsKilled) {
  auto job = start(3, {FAILING_RANK, "small_calls"});
  await_all_running(*job, 3);
  ASSERT_TRUE(send_signal(pid_of(*job, 1), SIGKILL));
  EXPECT_EQ(job->wait(60s), 128 + SIGKILL);
}

TEST_F(Mpi, ARankThatIsLateIsNamedWhenTheTimeIsOver) {
  auto job = start(3, {FAILING_RANK, "straggler"}, {"--enable-recovery", "--stdin", "1"});
  await_all_running(*job, 3);
  for (int rank : {0, 2}) {
    SCOPED_TRACE(rank);
    EXPECT_THAT(job->expect_line("TimeoutError"),
                AllOf(HasSubstr("did not finish within 1500 ms"), HasSubstr("Late: rank 1")));
  }
  job->say("go on");
  EXPECT_THAT(job->expect_line("TimeoutError"), HasSubstr("rank 1:"));
  job->wait(60s);
}

TEST_F(Mpi, RanksThatMakeDifferentCallsAreAllTold) {
  const auto ran = run(3, {FAILING_RANK, "other_shapes"}, kGoOn);
  EXPECT_EQ(count_of(ran.output, "MismatchError"), 3) << ran.output;
  EXPECT_THAT(ran.output, AllOf(HasSubstr("all_reduce(sum, Float[5])"), HasSubstr("all_reduce(sum, Float[4])")));
}

// MPI_Finalize waits for every rank.
TEST_F(Mpi, ProgramsEndThoughARankIsFrozen) {
  auto job = start(3, {FAILING_RANK, "small_calls"});
  await_all_running(*job, 3);
  ASSERT_TRUE(send_signal(pid_of(*job, 1), SIGSTOP));
  for (int survivor = 0; survivor < 2; ++survivor)
    EXPECT_THAT(job->expect_line("PeerError"), HasSubstr("sent no heartbeat for"));
  EXPECT_EQ(job->wait(60s), kExitAfterError);
}

// --- the end of programs

TEST_F(Mpi, ProgramsThatLeaveTheirGroupsEndWell) {
  const std::vector<std::string> leaves{FAILING_RANK, "sums"};
  // OpenSSL is over before static variables are, and leaves behind what the group had of it.
  const std::vector<std::string> leaves_last{"env", "ASAN_OPTIONS=detect_leaks=0", TEST_RANKS, "mpi_rank",
                                             "group_in_a_static_variable"};
  for (const auto& command : {leaves, leaves_last}) {
    const auto ran = run(3, command);
    EXPECT_EQ(ran.code, 0) << ran.output;
    EXPECT_EQ(count_of(ran.output, "done"), 3) << ran.output;
  }
}

TEST_F(Mpi, AProgramThatExitsInTheMiddleOfAGroupIsNamed) {
  const auto ran = run(3, {FAILING_RANK, "exits_early"}, {"--enable-recovery", "--stdin", "none"});
  EXPECT_EQ(count_of(ran.output, "PeerError"), 2) << ran.output;
  EXPECT_THAT(ran.output, ContainsRegex("rank 1 \\(pid [0-9]+ on .*\\) is gone"));
}

}  // namespace
}  // namespace lockstep
