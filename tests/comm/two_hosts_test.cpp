// Two hosts on one machine: network namespaces that the test makes itself, with a cable or a router between them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/two_hosts.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

class TwoHosts : public lockstep::TwoHosts {
 protected:
  /// Four ranks, two on each host.
  void start(const std::string& scenario, const std::string& master_addr,
             std::map<std::string, std::string> variables = {}) {
    variables.insert({"TEST_BACKEND", "gloo"});
    lockstep::TwoHosts::start("aabb", {FAILING_RANK, scenario}, master_addr, variables);
  }

  void expect_a_job_runs(const std::string& master_addr) {
    start("counts", master_addr);
    for (auto& rank : ranks_) rank->expect_line("running");
    ranks_[0]->say("enough");
    for (auto& rank : ranks_) {
      rank->expect_line("done");
      EXPECT_EQ(rank->wait(), 0);
    }
  }
};

TEST_F(TwoHosts, TrainOverACable) {
  ASSERT_TRUE(connect_hosts(a_, "va", "10.77.0.1/24", b_, "vb", "10.77.0.2/24"));
  start("counts", "10.77.0.1");
  for (auto& rank : ranks_) rank->expect_line("running");
  std::string port = std::to_string(kPort);
  EXPECT_TRUE(b_.inside("bash -c 'exec 3<>/dev/tcp/10.77.0.1/" + port + "'"));
  EXPECT_FALSE(a_.inside("bash -c 'exec 3<>/dev/tcp/127.0.0.1/" + port + "'"))
      << "the store listens at the address of MASTER_ADDR and at no other";
  ranks_[0]->say("enough");
  for (auto& rank : ranks_) {
    rank->expect_line("done");
    EXPECT_EQ(rank->wait(), 0);
  }
}

TEST_F(TwoHosts, TrainOverIpv6) {
  ASSERT_TRUE(connect_hosts(a_, "va", "fd77::1/64", b_, "vb", "fd77::2/64"));
  expect_a_job_runs("fd77::1");
}

TEST_F(TwoHosts, ReachEachOtherThroughARouter) {
  NetworkHost router("r");
  ASSERT_TRUE(connect_hosts(a_, "va", "10.77.1.1/24", router, "ra", "10.77.1.254/24"));
  ASSERT_TRUE(connect_hosts(b_, "vb", "10.77.2.1/24", router, "rb", "10.77.2.254/24"));
  ASSERT_TRUE(router.inside("sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward'"));
  ASSERT_TRUE(a_.inside("ip route add default via 10.77.1.254") && b_.inside("ip route add default via 10.77.2.254"));
  expect_a_job_runs("10.77.1.1");
}

TEST_F(TwoHosts, ALinkThatGoesDownIsNoticedOnBothSides) {
  ASSERT_TRUE(connect_hosts(a_, "va", "10.77.0.1/24", b_, "vb", "10.77.0.2/24"));
  start("small_calls", "10.77.0.1", {{"TEST_HEARTBEAT_MS", "1500"}});
  for (auto& rank : ranks_) rank->expect_line("running");
  auto begin = Clock::now();
  ASSERT_TRUE(a_.inside("ip link set va down"));
  for (auto& rank : ranks_) {
    EXPECT_THAT(rank->expect_line("PeerError"), AllOf(HasSubstr("sent no heartbeat for"), HasSubstr("network")));
    EXPECT_EQ(rank->wait(), 3);
  }
  EXPECT_LT(Clock::now() - begin, 5s);
}

TEST_F(TwoHosts, ASecretIsNeededBeyondLoopback) {
  ASSERT_TRUE(connect_hosts(a_, "va", "10.77.0.1/24", b_, "vb", "10.77.0.2/24"));
  start("joins_only", "10.77.0.1", {{"LOCKSTEP_SECRET_FILE", ""}});
  for (auto& rank : ranks_)
    EXPECT_THAT(rank->expect_line("UsageError"), AllOf(HasSubstr("LOCKSTEP_SECRET_FILE"), HasSubstr("every host")));
}

}  // namespace
}  // namespace lockstep
