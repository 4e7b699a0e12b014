// Jobs that Open MPI's mpirun starts: one process for each rank, and one launcher for each node.

#include <filesystem>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/launcher_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;

class Mpirun : public testing::Test {
 protected:
  void SetUp() override {
    if (std::system("mpirun --version 2>/dev/null | grep -q 'Open MPI'") != 0)
      GTEST_SKIP() << "Open MPI's mpirun is not installed (apt-get install openmpi-bin)";
    std::ofstream(secret()) << std::string(32, 's');
    std::filesystem::permissions(secret(), std::filesystem::perms(0600));
  }

  std::string secret() const { return (folder_.path() / "secret").string(); }

  Finished run(int processes, std::vector<std::string> command, const std::map<std::string, std::string>& more = {}) {
    command.insert(command.begin(),
                   {"mpirun", "--oversubscribe", "--bind-to", "none", "-n", std::to_string(processes)});
    std::map<std::string, std::string> variables{{"OMPI_ALLOW_RUN_AS_ROOT", "1"},
                                                 {"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"},
                                                 {"XDG_STATE_HOME", folder_.path().string()},
                                                 {"LOCKSTEP_FLIGHT_DIR", folder_.path().string()},
                                                 {"TEST_BACKEND", "gloo"},
                                                 {"NO_COLOR", "1"}};  // what mpirun starts has a terminal
    variables.insert(more.begin(), more.end());
    RankProcess process(command, clean_environment(variables));
    const int code = process.wait(60s);
    return {code, process.output()};
  }

  TemporaryFolder folder_;
};

TEST_F(Mpirun, StartsRanksThatMeetWithoutALauncher) {
  const auto ran = run(4, {FAILING_RANK, "sums"});
  EXPECT_EQ(ran.code, 0) << ran.output;
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_THAT(ran.output, HasSubstr("rank " + std::to_string(rank) + " of 4: sum 10"));
}

TEST_F(Mpirun, LetsTheOthersNameARankThatIsGone) {
  const auto ran = run(3, {FAILING_RANK, "exits_early"});  // mpirun ends all when the first of them has said so
  EXPECT_EQ(ran.code, 3) << ran.output;
  EXPECT_THAT(ran.output, ContainsRegex("PeerError: rank [02]: barrier: rank 1 \\(pid [0-9]+ on .*\\) is gone"));
}

TEST_F(Mpirun, StartsALauncherForEachNode) {
  const auto ran =
      run(2, {LOCKSTEP_TOOL, "run", "-n", "2", FAILING_RANK, "sums"}, {{"LOCKSTEP_SECRET_FILE", secret()}});
  EXPECT_EQ(ran.code, 0) << ran.output;
  for (int rank = 0; rank < 4; ++rank) {
    const auto name = std::to_string(rank);
    EXPECT_THAT(ran.output, HasSubstr("[" + name + "] rank " + name + " of 4: sum 10"));
  }
}

TEST_F(Mpirun, ShowsWhatTheLaunchersSayOfARankThatFails) {
  const auto ran = run(2, {LOCKSTEP_TOOL, "run", "-n", "2", "--secret-file", secret(), LAUNCHED, "throw", "train"});
  EXPECT_EQ(ran.code, 4) << ran.output;
  EXPECT_THAT(ran.output, AllOf(ContainsRegex("lockstep run: rank 3 \\(pid [0-9]+ on .*\\) failed first"),
                                HasSubstr("std::runtime_error: no data in train")));
}

TEST_F(Mpirun, NeedsASecretForSeveralLaunchers) {
  const auto ran = run(2, {LOCKSTEP_TOOL, "run", "true"});
  EXPECT_EQ(ran.code, 2);
  EXPECT_THAT(ran.output, AllOf(HasSubstr("--secret-file FILE"), HasSubstr("--standalone")));
  EXPECT_EQ(run(2, {LOCKSTEP_TOOL, "run", "--standalone", "sh", "-c", "[ $WORLD_SIZE = 1 ]"}).code, 0);
}

}  // namespace
}  // namespace lockstep
