// Ranks that fork: the child must neither use the group nor disturb it, whatever it does and however it ends.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/failing_job.h"

namespace lockstep {
namespace {

using Fork = FailingJob;

TEST_F(Fork, AChildIsRefusedAndItsParentGoesOn) {
  auto ranks = job("forks", 2, {{"OMP_NUM_THREADS", "1"}});
  ranks.start_all();
  for (int rank = 0; rank < 2; ++rank) {
    ranks[rank].expect_line("done");
    EXPECT_EQ(ranks[rank].wait(), 0) << ranks[rank].output();
  }
}

}  // namespace
}  // namespace lockstep
