// Ranks that do not come, come twice, or bring something else: who is told, and who goes on.

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/tcp_store.h>

#include "comm/failing_job.h"
#include "support/eventually.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

using Joining = FailingJob;

TEST_F(Joining, EveryRankThatCameSaysWhoDidNot) {
  auto ranks = job("joins_only", 4, {{"TEST_TIMEOUT_MS", "1500"}});
  ranks.start(0);
  ranks.start(2);
  for (int rank : {0, 2})
    EXPECT_THAT(ranks[rank].expect_line("TimeoutError"),
                AllOf(HasSubstr("2 of 4 ranks joined within"), HasSubstr("missing: rank 1 and 3")));
}

TEST_F(Joining, AMissingHostOfTheStoreIsSaidToBeMissing) {
  auto ranks = job("joins_only", 2, {{"TEST_TIMEOUT_MS", "800"}});
  ranks.start(1);
  EXPECT_THAT(ranks[1].expect_line("TimeoutError"),
              AllOf(HasSubstr("rank 1: missing: the host of the job's store (rank 0"),
                    HasSubstr("127.0.0.1:" + std::to_string(ranks.port()))));
}

TEST_F(Joining, ADuplicateRankIsRefusedAndTheJobGoesOn) {
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

TEST_F(Joining, AnotherWorldSizeIsRefusedOnBothSides) {
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

TEST_F(Joining, AProcessOfAnEarlierStartHasNoKey) {
  auto ranks = job("joins_only", 2, {{"TEST_TIMEOUT_MS", "5000"}, {"LOCKSTEP_RESTART_COUNT", "1"}});
  ranks.start(0);
  ranks.variables()["LOCKSTEP_RESTART_COUNT"] = "0";
  ranks.start(1);
  EXPECT_THAT(ranks[1].expect_line("PeerError"), HasSubstr("do not have the same secret"));
  ranks.variables()["LOCKSTEP_RESTART_COUNT"] = "1";
  ranks.start(1);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].output();
}

TEST_F(Joining, AnotherJobsSecretOpensNothing) {
  auto ranks = job("joins_only", 2, {{"TEST_TIMEOUT_MS", "2000"}});
  ranks.start(0);
  TemporaryFolder other;
  ranks.variables()["XDG_STATE_HOME"] = other.path().string();
  ranks.start(1);
  EXPECT_THAT(ranks[1].expect_line("PeerError"), HasSubstr("do not have the same secret"));
  EXPECT_THAT(ranks[0].expect_line("TimeoutError"), HasSubstr("missing: rank 1"));
}

TEST_F(Joining, APortInUseNamesItsOwner) {
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

TEST_F(Joining, AFileThatADeadJobLeftIsNamedAtOnce) {
  const auto file = (folder_.path() / "store").string();
  const std::map<std::string, std::string> variables{
      {"LOCKSTEP_INIT_METHOD", "file://" + file}, {"MASTER_ADDR", ""}, {"MASTER_PORT", ""}};
  auto dead = job("joins_only", 2, variables);
  dead.start(0);
  ASSERT_TRUE(eventually([&] { return std::filesystem::exists(file); }));
  dead[0].signal(SIGKILL);
  dead[0].wait();
  auto next = job("joins_only", 2, variables);
  next.start(1);  // whose place in the old file is free
  EXPECT_THAT(next[1].expect_line("UsageError"),
              AllOf(HasSubstr("rank 1: joining"), HasSubstr(file + " was left behind by a job that has ended"),
                    HasSubstr("pid " + std::to_string(dead[0].pid())), HasSubstr("rm " + file)));
  EXPECT_EQ(next[1].wait(), kExitAfterError);
  EXPECT_TRUE(std::filesystem::exists(file));
}

TEST_F(Joining, BackendThreadsRefusesProcesses) {
  auto ranks = job("joins_only", 2, {{"TEST_BACKEND", "threads"}});
  ranks.start_all();
  EXPECT_THAT(ranks[1].expect_line("UsageError"),
              AllOf(HasSubstr("needs all ranks in one process"), HasSubstr(std::to_string(ranks[0].pid()))));
  EXPECT_THAT(ranks[0].expect_line("PeerError"), HasSubstr(who(ranks, 1) + " gave up: backend threads"));
}

TEST_F(Joining, RunningOutOfDescriptorsIsAClearError) {
  auto ranks = job("without_descriptors", 3, {{"TEST_TIMEOUT_MS", "5000"}});
  ranks.start_all();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[rank].wait(), kExitAfterError) << ranks[rank].output();
  EXPECT_THAT(ranks[0].output() + ranks[1].output() + ranks[2].output(), HasSubstr("Too many open files"));
}

TEST_F(Joining, RunningOutOfThreadsIsAClearError) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can become a user without threads";
  auto ranks =
      job("without_threads", 2, {{"TEST_TIMEOUT_MS", "3000"}, {"XDG_STATE_HOME", "/tmp/lockstep-test-nobody"}});
  ranks.start(0);
  EXPECT_THAT(ranks[0].expect_line("SystemError"), AllOf(HasSubstr("cannot start a thread"), HasSubstr("ulimit -u")));
}

TEST_F(Joining, StrangersOnThePortDoNotDisturbTheJob) {
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
  EXPECT_THAT(ranks[0].output(), HasSubstr("rejected a connection"));
  for (int old : silent) ::close(old);
}

}  // namespace
}  // namespace lockstep
