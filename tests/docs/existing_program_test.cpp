// The program of docs/existing_program.md: as it is, and with the diff of the page applied.

#include <iostream>

#include <gmock/gmock.h>

#include "fragments.h"

namespace existing_program {

#define main train
namespace before {
#include "docs/existing_program/the_program.inc"
}
namespace after {
#include "docs/existing_program/the_change.inc"
}
#undef main

TEST(ExistingProgramPage, TheDistributedProgramTrainsAndSavesTheModel) {
  on_two_ranks([](const lockstep::ProcessGroup& world) {
    testing::internal::CaptureStdout();
    EXPECT_EQ(after::train(), 0);
    const auto printed = testing::internal::GetCapturedStdout();
    if (world.rank() != 0) {
      EXPECT_EQ(printed, "");
      return;
    }
    EXPECT_THAT(printed, testing::ContainsRegex("^epoch 1  loss 0[.][0-9]+  accuracy 0[.][0-9]+\n"));
    EXPECT_THAT(printed, testing::ContainsRegex("\nepoch 5  loss 0[.][0-9]+  accuracy 0[.]9[0-9]+\n$"));
    before::Net net;  // the program without lockstep loads the file
    torch::load(net, "net.pt");
    const before::Points points(1000);
    EXPECT_GT(net(points.points).argmax(1).eq(points.is_inside).to(torch::kFloat).mean().item<double>(), 0.9);
  });
}

}  // namespace existing_program
