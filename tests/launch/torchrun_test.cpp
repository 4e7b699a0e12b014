// Jobs that PyTorch's own torchrun starts: its agent has a store at MASTER_PORT already. Debian's torchrun is broken
// with Python 3.11, so this needs a PyTorch 2.x.

#include <cstdlib>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "launch/launcher_process.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::ContainsRegex;
using testing::HasSubstr;

class Torchrun : public testing::Test {
 protected:
  void SetUp() override {
    const char* python = std::getenv("LOCKSTEP_TEST_PYTHON_2X");
    if (!python || !*python) GTEST_SKIP() << "no python3 with PyTorch 2.x: ./test --torch wheel installs one";
    python_ = python;
  }

  Finished run(int ranks, const std::string& scenario) {
    RankProcess process({python_, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                         std::to_string(ranks), "--no-python", FAILING_RANK, scenario},
                        clean_environment({{"XDG_STATE_HOME", folder_.path().string()},
                                           {"LOCKSTEP_FLIGHT_DIR", folder_.path().string()},
                                           {"TEST_BACKEND", "shm"}}));
    process.say("now");  // for rank 1 of exits_early: all of them read what torchrun reads
    const int code = process.wait(120s);
    return {code, process.output()};
  }

  std::string python_;
  TemporaryFolder folder_;
};

TEST_F(Torchrun, StartsRanksThatMeetBesideItsOwnStore) {
  const auto ran = run(3, "sums");
  EXPECT_EQ(ran.code, 0) << ran.output;
  for (int rank = 0; rank < 3; ++rank)
    EXPECT_THAT(ran.output, HasSubstr("rank " + std::to_string(rank) + " of 3: sum 6"));
}

TEST_F(Torchrun, LetsTheOthersNameARankThatIsGone) {
  const auto ran = run(3, "exits_early");
  EXPECT_NE(ran.code, 0) << ran.output;
  EXPECT_THAT(ran.output, ContainsRegex("PeerError: rank [02]: barrier: rank 1 \\(pid [0-9]+ on .*\\) is gone"));
}

}  // namespace
}  // namespace lockstep
