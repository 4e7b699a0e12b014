// The hierarchy over a cable between two hosts: what "auto" comes to, and what every rank is told when one dies or the
// cable is cut.

#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/failing_job.h"
#include "support/two_hosts.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using Clock = std::chrono::steady_clock;

class Hierarchy : public TwoHosts {
 protected:
  void SetUp() override {
    TwoHosts::SetUp();
    if (IsSkipped()) return;
    ASSERT_TRUE(connect_hosts(a_, "va", "10.77.0.1/24", b_, "vb", "10.77.0.2/24"));
  }

  void expect_right_results(const std::string& host_of_rank) {
    start(host_of_rank, {TEST_RANKS, "hosts_rank"}, kMaster, {{"OMP_NUM_THREADS", "1"}});
    for (auto& rank : ranks_) EXPECT_EQ(rank->expect_line("world: "), "world: hierarchical");
    for (auto& rank : ranks_) {
      rank->expect_line("done");
      EXPECT_EQ(rank->wait(), 0);
    }
  }

  /// Ranks of failing_rank, in the middle of their calls.
  void start_calls(const std::string& host_of_rank, const std::string& scenario) {
    ranks_.clear();
    start(host_of_rank, {FAILING_RANK, scenario}, kMaster,
          {{"TEST_BACKEND", "auto"}, {"TEST_HEARTBEAT_MS", "1500"}, {"OMP_NUM_THREADS", "1"}});
    for (auto& rank : ranks_) rank->expect_line("running", 60s);
  }

  void expect_survivors_name(int victim) {
    auto begin = Clock::now();
    ranks_[victim]->signal(SIGKILL);
    auto name = "rank " + std::to_string(victim) + " (pid " + std::to_string(ranks_[victim]->pid()) + " on ";
    for (auto& rank : ranks_) {
      if (rank == ranks_[victim]) continue;
      auto line = rank->expect_line("PeerError");
      EXPECT_THAT(line, AllOf(HasSubstr(name), HasSubstr("is gone"), HasSubstr("all_reduce")));
      EXPECT_LT(Clock::now() - begin, 1s * kSlowness) << line;
    }
    for (auto& rank : ranks_)
      if (rank != ranks_[victim]) {
        EXPECT_EQ(rank->wait(), kExitAfterError);
      }
  }

  static constexpr const char* kMaster = "10.77.0.1";
};

TEST_F(Hierarchy, NeighboursOnAHostReduceRight) {
  expect_right_results("aabb");
}

TEST_F(Hierarchy, InterleavedRanksReduceRight) {
  expect_right_results("abab");
}

TEST_F(Hierarchy, HostsWithDifferentNumbersOfRanksReduceRight) {
  expect_right_results("aab");
}

// Of the host that has the store and of the other; between small calls and while a large one crosses.
TEST_F(Hierarchy, ARankKilledOnOneHostIsNamedOnBothWithinASecond) {
  for (std::string scenario : {"small_calls", "large_calls"}) {
    for (int victim : {1, 2}) {
      SCOPED_TRACE(scenario + ", rank " + std::to_string(victim));
      start_calls("aabb", scenario);
      expect_survivors_name(victim);
    }
  }
}

// The rank that is in no column: its host alone hears nothing more from it.
TEST_F(Hierarchy, ARankThatHasNoPartnerOnTheOtherHostIsNamedThereToo) {
  start_calls("aab", "large_calls");
  expect_survivors_name(1);
}

TEST_F(Hierarchy, ACableThatIsCutInTheMiddleOfACallEndsEveryRank) {
  start_calls("aabb", "large_calls");
  auto begin = Clock::now();
  ASSERT_TRUE(a_.inside("ip link set va down"));
  for (auto& rank : ranks_) {
    EXPECT_THAT(rank->expect_line("PeerError"),
                AllOf(HasSubstr("sent no heartbeat for"), HasSubstr("network"), HasSubstr("all_reduce")));
    EXPECT_EQ(rank->wait(), kExitAfterError);
  }
  EXPECT_LT(Clock::now() - begin, 5s * kSlowness);
}

}  // namespace
}  // namespace lockstep
