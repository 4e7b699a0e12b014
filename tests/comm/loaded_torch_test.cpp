// A program that loads another LibTorch than lockstep was built with.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/rank_process.h"

namespace lockstep {
namespace {

using testing::HasSubstr;
using testing::Not;

TEST(LoadedTorch, IsTheOneThatLockstepWasBuiltWith) {
  RankProcess probe({LOCKSTEP_PROBE}, {});
  EXPECT_EQ(probe.wait(), 0) << probe.output();
  EXPECT_THAT(probe.output(), Not(HasSubstr("built with LibTorch")));
}

TEST(LoadedTorch, OfAnotherReleaseEndsTheProgramWithTheReason) {
  RankProcess probe({LOCKSTEP_PROBE}, {{"LD_PRELOAD", OTHER_TORCH}});
  EXPECT_EQ(probe.wait(), 78) << probe.output();
  EXPECT_THAT(probe.output(), HasSubstr("lockstep: built with LibTorch " TORCH_RELEASE "."));
  EXPECT_THAT(probe.output(), HasSubstr("but this program loaded LibTorch 0.4.1 from " OTHER_TORCH));
  EXPECT_THAT(probe.output(), HasSubstr("LD_LIBRARY_PATH"));
}

}  // namespace
}  // namespace lockstep
