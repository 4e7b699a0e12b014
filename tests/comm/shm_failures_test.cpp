// What a rank over shm may still do to the memory of another whose call has failed, and what a dead rank leaves there.

#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/failing_job.h"
#include "support/eventually.h"

namespace lockstep {
namespace {

bool is_stopped(const RankProcess& process) {
  std::ifstream status("/proc/" + std::to_string(process.pid()) + "/stat");
  std::string pid, name, state;
  status >> pid >> name >> state;
  return state == "T";
}

class ShmFailures : public FailingJob {
 protected:
  /// Whether the rank could be stopped in time; else nothing is shown.
  bool stop_continue_and_check(const std::string& scenario) {
    auto ranks = job(scenario, 2, {{"TEST_BACKEND", "shm"}, {"OMP_NUM_THREADS", "1"}});
    ranks.start_all();
    if (ranks[1].expect_line("") == "joined" && ranks[1].expect_line("") == "too late") return false;
    EXPECT_TRUE(eventually([&] { return is_stopped(ranks[1]); }));
    ranks[0].say("give up");
    ranks[0].expect_line("reused");
    ranks[1].signal(SIGCONT);
    EXPECT_EQ(ranks[1].wait(), kExitAfterError) << "a call that another rank gave up cannot succeed\n"
                                                << ranks[1].output();
    ranks[0].say("look");
    EXPECT_EQ(ranks[0].wait(), 0);
    EXPECT_THAT(ranks[0].output(), testing::HasSubstr("intact"));
    return true;
  }

  void expect_unharmed(const std::string& scenario) {
    for (int attempt = 0; attempt < 10; ++attempt)
      if (stop_continue_and_check(scenario)) return;
    ADD_FAILURE() << "rank 1 could not be stopped in the middle of its call";
  }
};

TEST_F(ShmFailures, ALateRankDoesNotWriteToATensorThatIsInUseAgain) {
  expect_unharmed("stops_in_all_reduce");
}

TEST_F(ShmFailures, ALateRankIsToldThatWhatItReadMayHaveChanged) {
  expect_unharmed("stops_in_broadcast");
}

TEST_F(ShmFailures, ARankThatWasKilledLeavesNoMemoryInUse) {
  auto ranks = job("frees_memory_after_a_kill", 2, {{"TEST_BACKEND", "shm"}});
  ranks.start_all();
  for (int rank = 0; rank < 2; ++rank) ranks[rank].expect_line("running");
  ranks[1].signal(SIGKILL);
  EXPECT_EQ(ranks[0].wait(), 0) << ranks[0].output();
}

}  // namespace
}  // namespace lockstep
