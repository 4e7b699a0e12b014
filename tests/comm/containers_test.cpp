// Ranks that are on one host but in containers of their own: what they still share decides about shared memory.

#include <unistd.h>

#include <filesystem>
#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/network_host.h"
#include "support/rank_process.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

/// Two ranks that cannot see each other's processes, and with `own_shm` nor each other's /dev/shm.
class Containers : public testing::Test {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "only root can make namespaces";
  }

  std::unique_ptr<RankProcess> start(const std::string& backend, bool own_shm) {
    std::string mounts = own_shm ? "mount -t tmpfs tmpfs /dev/shm && " : "";
    std::vector<std::string> command{LOCKSTEP_TOOL,  "run",        "-n",      "2",
                                     "unshare",      "--pid",      "--mount", "--fork",
                                     "--mount-proc", "bash",       "-c",      mounts + "exec \"$@\"",
                                     "rank",         FAILING_RANK, "sums"};
    return std::make_unique<RankProcess>(
        command, std::map<std::string, std::string>{{"TEST_BACKEND", backend}, {"LOCKSTEP_LOG", "info"}});
  }

  static size_t names_left() {
    size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
      count += entry.path().filename().string().starts_with("lockstep-");
    return count;
  }
};

TEST_F(Containers, ThatShareDevShmUseItAndLeaveNothingThere) {
  const size_t before = names_left();
  auto ranks = start("shm", false);
  EXPECT_EQ(ranks->wait(60s), 0) << ranks->output();
  EXPECT_THAT(ranks->output(), AllOf(HasSubstr("trying named shared memory"), HasSubstr("rank 0 of 2: sum 3"),
                                     HasSubstr("rank 1 of 2: sum 3")));
  EXPECT_EQ(names_left(), before);
}

TEST_F(Containers, ThatShareNothingAreToldWhy) {
  auto ranks = start("shm", true);
  EXPECT_EQ(ranks->wait(60s), 3) << ranks->output();
  EXPECT_THAT(ranks->output(), AllOf(HasSubstr("UsageError: rank 0: backend shm"), HasSubstr("different containers"),
                                     HasSubstr("backend 'gloo'")));
}

TEST_F(Containers, ThatShareNothingGetGlooByDefault) {
  auto ranks = start("auto", true);
  EXPECT_EQ(ranks->wait(60s), 0) << ranks->output();
  EXPECT_THAT(ranks->output(), AllOf(HasSubstr("warning: group 'world' uses backend gloo instead of shm"),
                                     HasSubstr("rank 0 of 2: sum 3"), HasSubstr("rank 1 of 2: sum 3")));
}

/// Without namespaces: what the ranks themselves refuse to one of them.
std::string output_of_ranks(const std::string& scenario) {
  RankProcess ranks({LOCKSTEP_TOOL, "run", "-n", "2", FAILING_RANK, scenario},
                    {{"TEST_BACKEND", "auto"}, {"LOCKSTEP_LOG", "info"}});
  EXPECT_EQ(ranks.wait(60s), 0) << ranks.output();
  return ranks.output();
}

TEST(Fallback, RanksWithoutAddressSpaceGetGlooAndAWarning) {
  EXPECT_THAT(output_of_ranks("sums_without_address_space"),
              AllOf(HasSubstr("warning: group 'world' uses backend gloo instead of shm"), HasSubstr("ulimit -v"),
                    HasSubstr("rank 0 of 2: sum 3"), HasSubstr("rank 1 of 2: sum 3")));
}

TEST(Fallback, RanksWithoutMemfdUseNamedSharedMemory) {
  EXPECT_THAT(output_of_ranks("sums_without_memfd"),
              AllOf(HasSubstr("trying named shared memory"), HasSubstr("backend shm"), HasSubstr("rank 0 of 2: sum 3"),
                    HasSubstr("rank 1 of 2: sum 3")));
}

TEST(Loopback, OfAHostWithoutIpv4IsThatOfIpv6) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make network namespaces";
  NetworkHost host("six");
  if (!host.is_made() || !host.inside("ip address delete 127.0.0.1/8 dev lo"))
    GTEST_SKIP() << "this machine makes no network namespaces (ip netns)";
  RankProcess ranks({"ip", "netns", "exec", host.name(), LOCKSTEP_TOOL, "run", "-n", "2", FAILING_RANK, "sums"},
                    {{"TEST_BACKEND", "shm"}});
  EXPECT_EQ(ranks.wait(60s), 0) << ranks.output();
  EXPECT_THAT(ranks.output(), AllOf(HasSubstr("rank 0 of 2: sum 3"), HasSubstr("rank 1 of 2: sum 3")));
  RankProcess over_gloo({"ip", "netns", "exec", host.name(), LOCKSTEP_TOOL, "run", "-n", "2", FAILING_RANK, "sums"},
                        {{"TEST_BACKEND", "gloo"}});
  EXPECT_NE(over_gloo.wait(60s), 0);
  EXPECT_THAT(over_gloo.output(), AllOf(HasSubstr("SystemError: "), HasSubstr("IPv4 on the loopback interface"),
                                        HasSubstr("ip address add 127.0.0.1/8 dev lo"), HasSubstr("backend shm")));
}

}  // namespace
}  // namespace lockstep
