// One job on several nodes: launchers on loopback, and in network namespaces.

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/version.h>

#include "base/wait_notice.h"
#include "launch/launcher_process.h"
#include "rendezvous/net/secret.h"
#include "rendezvous/store/protocol.h"
#include "rendezvous/store/store_client.h"
#include "support/eventually.h"
#include "support/network_host.h"
#include "support/slow_relay.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using Clock = std::chrono::steady_clock;

class RunNodes : public testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(secret()) << std::string(32, 's');
    std::filesystem::permissions(secret(), std::filesystem::perms(0600));
  }

  std::string secret() const { return (folder_.path() / "secret").string(); }

  /// Starts the launcher of a node; `before` goes in front of the command.
  RankProcess& start(int node, int nodes, std::vector<std::string> arguments, std::vector<std::string> before = {}) {
    std::vector<std::string> flags{
        "--nnodes", std::to_string(nodes), "--node-rank",         std::to_string(node), "--master-addr",
        address_,   "--master-port",       std::to_string(port_), "--secret-file",      secret()};
    if (std::find(arguments.begin(), arguments.end(), "--secret-file") != arguments.end()) flags.resize(8);
    arguments.insert(arguments.begin(), flags.begin(), flags.end());
    auto command = run_command(arguments);
    command.insert(command.begin(), before.begin(), before.end());
    nodes_.push_back(std::make_unique<RankProcess>(
        command, clean_environment({{"LOCKSTEP_TEST_NODES", std::to_string(::getpid())}})));
    return *nodes_.back();
  }

  void expect_nothing_left() {
    const auto mark = "LOCKSTEP_TEST_NODES=" + std::to_string(::getpid());
    EXPECT_TRUE(eventually([&] { return processes_with(mark).empty(); })) << processes_with(mark).size();
  }

  TemporaryFolder folder_;
  int port_ = free_port();  // for those that are started next
  std::string address_ = "127.0.0.1";
  std::vector<std::unique_ptr<RankProcess>> nodes_;
};

// As srun and Kubernetes start them, but that all are on loopback.
TEST_F(RunNodes, TakeTheirPlaceFromWhatStartedThem) {
  using Variables = std::map<std::string, std::string>;
  using Starter = std::function<Variables(int node)>;
  const Starter srun = [](int node) -> Variables {
    return {{"SLURM_PROCID", std::to_string(node)},
            {"SLURM_NODEID", std::to_string(node)},
            {"SLURM_LOCALID", "0"},
            {"SLURM_STEP_NUM_TASKS", "2"},
            {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"},
            {"SLURM_STEP_NODELIST", "localhost,node1"},
            {"SLURM_JOB_ID", std::to_string(::getpid())},
            {"SLURM_STEP_ID", "0"}};
  };
  const Starter kubernetes = [&](int node) -> Variables {
    return {{"JOB_COMPLETION_INDEX", std::to_string(node)},
            {"PET_NNODES", "2"},
            {"MASTER_ADDR", "localhost"},
            {"MASTER_PORT", std::to_string(port_)}};
  };
  for (const auto& starter : {srun, kubernetes}) {
    nodes_.clear();
    for (int node : {0, 1}) {
      auto variables = starter(node);
      variables["LOCKSTEP_SECRET_FILE"] = secret();
      nodes_.push_back(std::make_unique<RankProcess>(
          run_command({"-n", "2", "sh", "-c", "echo $RANK of $WORLD_SIZE on node $NODE_RANK at $MASTER_ADDR"}),
          clean_environment(variables)));
    }
    for (auto& node : nodes_) EXPECT_EQ(node->wait(), 0) << node->output();
    EXPECT_THAT(nodes_[0]->output(), HasSubstr("[1] 1 of 4 on node 0 at localhost\n"));
    EXPECT_THAT(nodes_[1]->output(), HasSubstr("[3] 3 of 4 on node 1 at localhost\n"));
  }
}

TEST_F(RunNodes, NumberTheRanksOfAllAndShareOneJob) {
  const std::vector<std::string> show{
      "sh", "-c",
      "echo $RANK of $WORLD_SIZE, $LOCAL_RANK of $LOCAL_WORLD_SIZE, node $NODE_RANK $GROUP_RANK; "
      "echo job $LOCKSTEP_JOB_ID $MASTER_ADDR $MASTER_PORT"};
  auto with = [&](const std::string& workers) {
    auto arguments = show;
    arguments.insert(arguments.begin(), {"-n", workers});
    return arguments;
  };
  auto& third = start(2, 3, with("1"));  // nodes come in any order
  auto& first = start(0, 3, with("2"));
  auto& second = start(1, 3, with("1"));
  for (auto& node : nodes_) EXPECT_EQ(node->wait(), 0) << node->output();
  EXPECT_THAT(first.output(), HasSubstr("[1] 1 of 4, 1 of 2, node 0 0\n"));
  EXPECT_THAT(second.output(), HasSubstr("[2] 2 of 4, 0 of 1, node 1 1\n"));
  EXPECT_THAT(third.output(), HasSubstr("[3] 3 of 4, 0 of 1, node 2 2\n"));
  auto job = [](RankProcess& node, int rank) {
    return lines_after(node.output(), "[" + std::to_string(rank) + "] job ");
  };
  EXPECT_EQ(job(first, 0), job(third, 3));
  EXPECT_EQ(job(first, 0), job(second, 2));
}

TEST_F(RunNodes, StopOnAllWhenARankOfOneFailsAndTellTheRanksFirst) {
  auto& first = start(0, 2, {"-n", "2", LAUNCHED, "meet", "exit"});
  auto& second = start(1, 2, {"-n", "2", LAUNCHED, "meet", "exit"});
  for (auto& node : nodes_) {
    EXPECT_EQ(node->wait(), 3);
    EXPECT_THAT(node->output(), ContainsRegex("lockstep run: rank 3 \\(pid [0-9]+ on .*failed first.*: exit code 9\n"));
    EXPECT_THAT(node->output(), HasSubstr("failed as a consequence: ranks"));
  }
  for (const char* rank : {"[0] ", "[1] "})
    EXPECT_THAT(lines_after(first.output(), rank), ElementsAre(HasSubstr("told before SIGTERM: PeerError: rank 3")));
  EXPECT_THAT(lines_after(second.output(), "[2] "), ElementsAre(HasSubstr("told before SIGTERM: PeerError: rank 3")));
}

TEST_F(RunNodes, EndWorkersThatKnowNothingOfTheStoreWhereverOneFails) {
  for (int node : {0, 1, 2}) start(node, 3, {"sh", "-c", "[ $RANK = 1 ] && exit 4; exec sleep 60"});
  for (auto& node : nodes_) {
    EXPECT_EQ(node->wait(40s), 3);
    EXPECT_THAT(node->output(), ContainsRegex("lockstep run: rank 1 .* exit code 4\n"));
  }
}

TEST_F(RunNodes, RestartOnAllAsANewGeneration) {
  const std::vector<std::string> fail_once{"--max-restarts",
                                           "2",
                                           "--restart-delay",
                                           "0.05",
                                           "sh",
                                           "-c",
                                           "echo generation $LOCKSTEP_RESTART_COUNT; [ $LOCKSTEP_RESTART_COUNT = 1 ] "
                                           "&& exit; [ $RANK = 1 ] && exit 4; exec sleep 60"};
  auto& first = start(0, 2, fail_once);
  auto& second = start(1, 2, fail_once);
  for (auto& node : nodes_) EXPECT_EQ(node->wait(), 0) << node->output();
  EXPECT_THAT(first.output(), AllOf(HasSubstr("[0] generation 1\n"), HasSubstr("rank 1"), HasSubstr("restart 1 of 2")));
  EXPECT_THAT(lines_after(second.output(), "[1] "), ElementsAre("generation 0", "generation 1"));
}

TEST_F(RunNodes, NameTheOneThatDoesNotCome) {
  auto& first = start(0, 3, {"--join-timeout", "4", "true"});  // long enough to start on a busy machine
  auto& third = start(2, 3, {"--join-timeout", "20", "true"});
  for (auto* node : {&first, &third}) {
    EXPECT_EQ(node->wait(40s), 5);
    EXPECT_THAT(node->output(), HasSubstr("node 1 of 3 did not join within 4 s"));
  }
}

TEST_F(RunNodes, SayThatTheFirstDidNotCome) {
  auto& second = start(1, 2, {"--join-timeout", "0.3", "true"});
  EXPECT_EQ(second.wait(40s), 5);
  EXPECT_THAT(second.output(), HasSubstr("node 0 did not answer within 0.3 s"));
}

TEST_F(RunNodes, JoinOverASlowNetwork) {
  SlowRelay relay(port_, 150ms);  // 300 ms there and back; encryption and welcome take two such
  auto& first = start(0, 2, {"sh", "-c", "echo node $NODE_RANK"});
  port_ = relay.port();
  auto& second = start(1, 2, {"sh", "-c", "echo node $NODE_RANK"});
  EXPECT_EQ(second.wait(30s), 0) << second.output();
  EXPECT_EQ(first.wait(30s), 0) << first.output();
  EXPECT_EQ(first.output(), "[0] node 0\n");
  EXPECT_EQ(second.output(), "[1] node 1\n");
}

TEST_F(RunNodes, WarnIfTheyRunDifferentCommands) {
  const std::string much(100'000, 'x');
  start(0, 4, {"true", "--lr", "0.1", much});
  start(1, 4, {"true", "--lr", "0.1", much});
  start(2, 4, {"true", "--lr", "0.2", "two words"});
  start(3, 4, {"true", "--lr", "0.1", much + "y"});
  for (auto& node : nodes_) EXPECT_EQ(node->wait(), 0) << node->output();
  const auto warning_of = [&](size_t node) { return lines_after(nodes_[node]->output(), "lockstep run: warning: "); };
  const auto commands = AllOf(ContainsRegex("node 0 on [^ ]+ runs true --lr 0.1 xxx"),
                              ContainsRegex("node 2 on [^ ]+ runs true --lr 0.2 'two words'"),
                              HasSubstr("; start the same program with the same arguments on all nodes"));
  EXPECT_THAT(warning_of(0), ElementsAre(AllOf(commands, HasSubstr(", 1 more differ from node 0"))));
  EXPECT_THAT(warning_of(1), IsEmpty());
  EXPECT_THAT(warning_of(2), ElementsAre(commands));
  EXPECT_THAT(warning_of(3), ElementsAre(AllOf(HasSubstr("node 3 on"), HasSubstr("(they differ further on)"))));
  for (auto& node : nodes_) EXPECT_LT(node->output().size(), 2000u);
}

TEST_F(RunNodes, SayThatTheFirstDoesNotAnswerWhenSomethingListensThere) {
  const auto silent = listen_at({"127.0.0.1", port_});
  auto& second = start(1, 2, {"--join-timeout", "0.5", "true"});
  EXPECT_EQ(second.wait(40s), 5);
  EXPECT_THAT(second.output(), AllOf(HasSubstr("node 0 did not answer within 0.5 s"), HasSubstr("it did not answer"),
                                     Not(HasSubstr("could not connect"))));
}

TEST_F(RunNodes, CanBeInterruptedWhileTheFirstDoesNotAnswer) {
  const auto silent = listen_at({"127.0.0.1", port_});
  auto& second = start(1, 2, {"true"});
  pollfd somebody{silent.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&somebody, 1, 10000), 1) << "it has connected";
  second.signal(SIGINT);
  EXPECT_EQ(second.wait(40s), 6) << second.output();
}

TEST_F(RunNodes, SayWhomTheyWaitForWhenItTakesLong) {
  RankProcess alone(run_command({"-n", "1", "sleep", "60"}), clean_environment());
  auto& first = start(0, 3, {"true"});
  auto& third = start(2, 3, {"true"});
  port_ = free_port();
  auto& lonely = start(1, 2, {"true"});
  RankProcess silent(run_command({"-n", "2", "sh", "-c", "[ $RANK = 0 ] || kill -STOP $$; exec sleep 60"}),
                     clean_environment());
  RankProcess joined(run_command({"-n", "2", LAUNCHED, "meet", "rest"}), clean_environment());
  RankProcess loud(run_command({"sh", "-c", "echo started; exec sleep 60"}), clean_environment());
  for (auto* node : {&first, &third})
    EXPECT_THAT(node->expect_line("lockstep run: has waited 10 s for node 1 of 3 to join"), HasSubstr("--node-rank"));
  EXPECT_THAT(lonely.expect_line("lockstep run: has waited 10 s for node 0 to answer at 127.0.0.1:"),
              HasSubstr("--node-rank 0"));
  EXPECT_THAT(silent.expect_line("lockstep run: no output since the start 10 s ago; 2 of 2 ranks have not joined"),
              AllOf(ContainsRegex("rank 0 \\(pid [0-9]+ on .*: sleep, sleeping\\)"),
                    ContainsRegex("rank 1 \\(pid [0-9]+ on .*: sh, stopped by a signal")));
  for (auto* quiet : {&alone, &joined, &loud}) {
    quiet->signal(SIGTERM);
    quiet->wait(40s);
    EXPECT_THAT(quiet->output(), Not(HasSubstr("no output")));
  }
}

TEST(WaitNotice, IsDueAfterTenSecondsAndThenLessAndLessOften) {
  const WaitNotice::Clock::time_point begin{};
  WaitNotice notice(begin);
  std::vector<int> due;
  for (int second = 0; second < 3600; ++second)
    if (notice.is_due(begin + std::chrono::seconds(second))) due.push_back(second);
  EXPECT_THAT(due, ElementsAre(10, 30, 70, 150, 310, 630, 1230, 1830, 2430, 3030));
  EXPECT_EQ(notice.seconds(begin + 29600ms), 30);
}

TEST_F(RunNodes, CanBeInterruptedWhileTheyWait) {
  auto& second = start(1, 2, {"true"});
  auto& third = start(2, 3, {"true"});
  for (auto* node : {&second, &third}) {
    EXPECT_TRUE(eventually([&] {  // it takes signals
      std::ifstream status("/proc/" + std::to_string(node->pid()) + "/status");
      for (std::string word; status >> word;)
        if (word == "SigBlk:") return status >> word && word != std::string(16, '0');
      return false;
    }));
    node->signal(SIGINT);
    EXPECT_EQ(node->wait(40s), 6) << node->output();
  }
}

TEST_F(RunNodes, EndWithTheLauncherOfAnyOfThem) {
  for (int victim : {1, 0}) {
    nodes_.clear();
    start(0, 2, {"--grace", "0.2", LAUNCHED, "family"});
    start(1, 2, {"--grace", "0.2", LAUNCHED, "family"});
    for (auto& node : nodes_) node->expect_line("[");
    nodes_[static_cast<size_t>(victim)]->signal(SIGKILL);
    auto& other = *nodes_[static_cast<size_t>(1 - victim)];
    EXPECT_EQ(other.wait(40s), 5);
    EXPECT_THAT(other.output(),
                AllOf(HasSubstr("the launcher of node " + std::to_string(victim)), HasSubstr("is gone")));
    expect_nothing_left();
  }
}

TEST_F(RunNodes, ArePreemptedTogether) {
  for (int told : {0, 1}) {
    nodes_.clear();
    start(0, 2, {"--max-restarts", "2", LAUNCHED, "told"});
    start(1, 2, {"--max-restarts", "2", LAUNCHED, "told"});
    for (auto& node : nodes_) node->expect_line("[");
    nodes_[static_cast<size_t>(told)]->signal(SIGUSR1);
    for (auto& node : nodes_) {
      EXPECT_EQ(node->wait(40s), 6) << node->output();
      EXPECT_THAT(node->output(), HasSubstr("got USR1"));
    }
  }
}

TEST_F(RunNodes, WaitForTheLastAndEndWellTogether) {
  auto& first = start(0, 2, {"sh", "-c", "echo done"});
  auto& second = start(1, 2, {"sh", "-c", "echo started; while [ ! -e " + secret() + ".go ]; do sleep 0.01; done"});
  second.expect_line("[1] started");
  first.expect_line("[0] done");
  std::ofstream(secret() + ".go") << "";
  EXPECT_EQ(first.wait(), 0);
  EXPECT_EQ(second.wait(), 0);
}

TEST_F(RunNodes, RefuseASecondOfTheSameRankAndGoOn) {
  auto& first = start(0, 2, {LAUNCHED, "told"});
  auto& second = start(1, 2, {LAUNCHED, "told"});
  second.expect_line("[1] started");
  auto& again = start(1, 2, {"true"});
  EXPECT_EQ(again.wait(), 2);
  EXPECT_THAT(again.output(), HasSubstr("--node-rank 1 is taken by pid " + std::to_string(second.pid())));
  first.signal(SIGTERM);
  EXPECT_EQ(first.wait(), 6);
  EXPECT_EQ(second.wait(), 6);
}

TEST_F(RunNodes, RefuseDifferentNumbersOfNodes) {
  auto& first = start(0, 2, {"true"});
  auto& second = start(1, 3, {"--join-timeout", "5", "true"});
  EXPECT_EQ(first.wait(), 2);
  EXPECT_THAT(first.output(), HasSubstr("was started with --nnodes 3"));
  EXPECT_NE(second.wait(), 0);
}

// Stand-in for the launcher of another version: a client that joins as it does.
TEST_F(RunNodes, RefuseAnotherVersionAndNameBoth) {
  constexpr int kLaunchers = -1;
  const auto key = Secret::from_file(secret()).key(kLaunchers);
  for (const auto& fields : {std::vector<std::string>{"9.9.9", "elsewhere", "4711", "1", "2", "a job"},
                             std::vector<std::string>{"9.9.9", "elsewhere", "and what that version adds"}}) {
    auto& first = start(0, 2, {"true"});
    StoreClient other({{address_, port_}, key, kLaunchers, Clock::now() + 60s, 30s});
    other.call(Verb::kJoin, {"launch/node/1", pack(fields), "1", "elsewhere", "elsewhere", "4711", "30000"});
    EXPECT_EQ(first.wait(), 2);
    EXPECT_THAT(first.output(),
                AllOf(HasSubstr("node 1 on elsewhere has lockstep 9.9.9, node 0 has " LOCKSTEP_VERSION_STRING),
                      HasSubstr("install the same version on all nodes")));
    port_ = free_port();
  }
}

TEST_F(RunNodes, RefuseToStartWithoutACommonSecret) {
  auto run = run_launcher({"--nnodes", "2", "--master-addr", "127.0.0.1", "true"});
  EXPECT_EQ(run.code, 2);
  EXPECT_THAT(run.output, HasSubstr("--secret-file"));
  auto& first = start(0, 2, {"--join-timeout", "3", "true"});
  const auto other = secret() + ".other";
  std::ofstream(other) << std::string(32, 't');
  std::filesystem::permissions(other, std::filesystem::perms(0600));
  auto& second = start(1, 2, {"--join-timeout", "3", "--secret-file", other, "true"});
  EXPECT_NE(second.wait(), 0);
  EXPECT_THAT(second.output(), HasSubstr("do not have the same secret"));
  EXPECT_EQ(first.wait(), 5);
}

TEST_F(RunNodes, MeetAcrossHosts) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can make network namespaces";
  NetworkHost a("na"), b("nb");
  if (!a.is_made() || !b.is_made()) GTEST_SKIP() << "this machine makes no network namespaces (ip netns)";
  for (const char* addresses : {"10.78.0.1 10.78.0.2/24", "fd78::1 fd78::2/64"}) {
    nodes_.clear();
    const std::string both = addresses;
    address_ = both.substr(0, both.find(' '));
    const auto second = both.substr(both.find(' ') + 1);
    ASSERT_TRUE(connect_hosts(a, "la", address_ + second.substr(second.find('/')), b, "lb", second));
    start(0, 2, {"-n", "2", LAUNCHED, "meet", "kill"}, {"ip", "netns", "exec", a.name()});
    start(1, 2, {"-n", "2", LAUNCHED, "meet", "kill"}, {"ip", "netns", "exec", b.name()});
    for (auto& node : nodes_) {
      EXPECT_EQ(node->wait(), 4) << node->output();
      EXPECT_THAT(node->output(), HasSubstr("told before SIGTERM: PeerError: rank 3"));
    }
    a.inside("ip link delete la");
  }
}

// Both sides give up after the heartbeat limit of the ranks; the launchers wait longer, and meet again.
TEST_F(RunNodes, SayThatARankWasCutOffFromTheNetwork) {
  if (::getuid() != 0) GTEST_SKIP() << "only root can make network namespaces";
  NetworkHost a("ca"), b("cb");
  if (!a.is_made() || !b.is_made()) GTEST_SKIP() << "this machine makes no network namespaces (ip netns)";
  address_ = "10.79.0.1";
  ASSERT_TRUE(connect_hosts(a, "lc", "10.79.0.1/24", b, "ld", "10.79.0.2/24"));
  auto& first = start(0, 2, {LAUNCHED, "meet", "network"}, {"ip", "netns", "exec", a.name()});
  auto& second = start(1, 2, {LAUNCHED, "meet", "network"}, {"ip", "netns", "exec", b.name()});
  first.expect_line("[0] met");
  second.expect_line("[1] met");
  ASSERT_TRUE(a.inside("ip link set lc down"));
  EXPECT_THAT(first.expect_line("[0] told: "), AllOf(HasSubstr("rank 1"), HasSubstr("sent no heartbeat for")));
  EXPECT_THAT(second.expect_line("[1] told: "), AllOf(HasSubstr("node 0"), HasSubstr("sent no heartbeat for")));
  ASSERT_TRUE(a.inside("ip link set lc up"));
  for (auto& node : nodes_) {
    EXPECT_EQ(node->wait(), 3) << node->output();
    EXPECT_THAT(lines_after(node->output(), "lockstep run: ").back(),
                AllOf(ContainsRegex("rank 1 .* is to blame: stopped answering .ended later: exit code 1"),
                      HasSubstr("cut off its host or network")));
  }
}

}  // namespace
}  // namespace lockstep
