// What users of an older LibTorch are told.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/rank_process.h"

namespace lockstep {
namespace {

TEST(CompileCommand, NeedsANewerLibTorch) {
  RankProcess process({LOCKSTEP_TOOL, "compile", "model.py:make", "-o", "model.pt2"}, {});
  EXPECT_EQ(process.wait(), 1);
  EXPECT_THAT(process.output(), testing::HasSubstr("compiled models need LibTorch 2.11 or later"));
}

}  // namespace
}  // namespace lockstep
