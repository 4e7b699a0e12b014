#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "support/network_host.h"
#include "support/rank_process.h"
#include "support/temporary_folder.h"

namespace lockstep {

/// Fixture with two emulated hosts, a and b: network namespaces that the test connects itself.
class TwoHosts : public testing::Test {
 protected:
  void SetUp() override {
    if (::getuid() != 0) GTEST_SKIP() << "only root can make network namespaces";
    if (!run_quietly("ip -V >/dev/null")) GTEST_SKIP() << "there is no ip: apt-get install iproute2";
    if (!a_.is_made() || !b_.is_made()) GTEST_SKIP() << "this machine makes no network namespaces";
    std::ofstream(secret()) << std::string(32, 's');
    std::filesystem::permissions(secret(), std::filesystem::perms::owner_read);
  }

  std::string secret() const { return (folder_.path() / "secret").string(); }

  /// Starts one rank for each letter of `host_of_rank` on the host of that letter. Example: "aabb".
  void start(const std::string& host_of_rank, const std::vector<std::string>& program, const std::string& master_addr,
             const std::map<std::string, std::string>& variables = {}) {
    for (size_t rank = 0; rank < host_of_rank.size(); ++rank) {
      const NetworkHost& host = host_of_rank[rank] == 'a' ? a_ : b_;
      std::vector<std::string> command{"ip", "netns", "exec", host.name()};
      command.insert(command.end(), program.begin(), program.end());
      auto all = variables;
      all.insert({{"RANK", std::to_string(rank)},
                  {"WORLD_SIZE", std::to_string(host_of_rank.size())},
                  {"MASTER_ADDR", master_addr},
                  {"MASTER_PORT", std::to_string(kPort)},
                  {"LOCKSTEP_HOST_ID", host.name()},
                  {"LOCKSTEP_SECRET_FILE", secret()},
                  {"LOCKSTEP_FLIGHT_DIR", folder_.path().string()}});
      ranks_.push_back(std::make_unique<RankProcess>(command, all));
    }
  }

  static constexpr int kPort = 29512;
  TemporaryFolder folder_;
  NetworkHost a_{"a"};
  NetworkHost b_{"b"};
  std::vector<std::unique_ptr<RankProcess>> ranks_;
};

}  // namespace lockstep
