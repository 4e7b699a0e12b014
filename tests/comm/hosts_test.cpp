// Processes of this machine that believe to be on several hosts: which backend "auto" comes to, and what it reduces.

#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using Words = std::vector<std::string>;

class Hosts : public testing::Test {
 protected:
  /// A rank on each of these hosts; the groups are made in this order.
  void start(const Words& host_of_rank, const Words& groups = {}) {
    Words command{TEST_RANKS, "hosts_rank"};
    command.insert(command.end(), groups.begin(), groups.end());
    const auto port = std::to_string(free_port());
    for (size_t rank = 0; rank < host_of_rank.size(); ++rank)
      ranks_.push_back(std::make_unique<RankProcess>(
          command, std::map<std::string, std::string>{{"RANK", std::to_string(rank)},
                                                      {"WORLD_SIZE", std::to_string(host_of_rank.size())},
                                                      {"MASTER_ADDR", "127.0.0.1"},
                                                      {"MASTER_PORT", port},
                                                      {"LOCKSTEP_HOST_ID", host_of_rank[rank]},
                                                      {"XDG_STATE_HOME", folder_.path().string()},
                                                      {"OMP_NUM_THREADS", "1"}}));
  }

  void expect_world(const std::string& backend) {
    for (auto& rank : ranks_) EXPECT_EQ(rank->expect_line("world: "), "world: " + backend);
  }
  void expect_group(const std::vector<int>& members, const std::string& name, const std::string& backend) {
    for (int rank : members) EXPECT_EQ(ranks_[rank]->expect_line(name), name + ": " + backend);
  }
  void expect_all_done() {
    for (auto& rank : ranks_) {
      rank->expect_line("done");
      EXPECT_EQ(rank->wait(), 0);
    }
  }

  TemporaryFolder folder_;
  std::vector<std::unique_ptr<RankProcess>> ranks_;
};

TEST_F(Hosts, OneHostSharesMemory) {
  start({"a", "a"});
  expect_world("shm");
  expect_all_done();
}

TEST_F(Hosts, OneRankOnEachHostTakesGloo) {
  start({"a", "b"});
  expect_world("gloo");
  expect_all_done();
}

TEST_F(Hosts, HostsWithDifferentNumbersOfRanksAreAHierarchy) {
  start({"a", "b", "a"});
  expect_world("hierarchical");
  expect_all_done();
}

TEST_F(Hosts, AGroupTakesWhatItsOwnRanksNeed) {
  start({"a", "b", "a", "b"}, {"0,2", "1,3", "0,1", "1,2,3", "2"});
  expect_world("hierarchical");
  expect_group({0, 2}, "0,2", "shm");
  expect_group({1, 3}, "1,3", "shm");
  expect_group({0, 1}, "0,1", "gloo");
  expect_group({1, 2, 3}, "1,2,3", "hierarchical");
  expect_group({2}, "2", "threads");
  expect_all_done();
}

}  // namespace
}  // namespace lockstep
