#include "parallel/ddp/gradient_arrivals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/error.h>

#include "support/messages.h"

namespace lockstep {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

const std::vector<NamedParameter>& parameters() {
  static const std::vector<NamedParameter> parameters{
      {"first", torch::zeros(1)}, {"second", torch::zeros(1)}, {"third", torch::zeros(1)}};
  return parameters;
}

TEST(GradientArrivals, AGradientIsCompleteWhenItHasArrivedOnce) {
  GradientArrivals arrivals(parameters(), 3, /*static_graph=*/false);
  for (int backward = 0; backward < 2; ++backward) {
    arrivals.begin();
    EXPECT_TRUE(arrivals.add(2));
    EXPECT_TRUE(arrivals.add(0));
    EXPECT_THAT(arrivals.order(), ElementsAre(2, 0));
    EXPECT_TRUE(arrivals.has(0));
    EXPECT_FALSE(arrivals.has(1));
    arrivals.end();
    EXPECT_FALSE(arrivals.excludes(1)) << "the next backward may use it";
  }
}

TEST(GradientArrivals, ASecondGradientInOneBackwardIsAnError) {
  GradientArrivals arrivals(parameters(), 3, /*static_graph=*/false);
  arrivals.begin();
  arrivals.add(1);
  const auto message = error_of<UsageError>([&] { arrivals.add(1); });
  EXPECT_THAT(message, HasSubstr("rank 3"));
  EXPECT_THAT(message, HasSubstr("'second' got a second gradient"));
}

TEST(GradientArrivals, AStaticGraphIsRecordedInTheFirstBackward) {
  GradientArrivals arrivals(parameters(), 0, /*static_graph=*/false);
  arrivals.set_static_graph();
  arrivals.begin();
  EXPECT_FALSE(arrivals.excludes(2));
  for (size_t parameter : {1u, 0u, 1u}) EXPECT_FALSE(arrivals.add(parameter)) << "more may follow";
  arrivals.end();
  for (int backward = 0; backward < 2; ++backward) {
    arrivals.begin();
    EXPECT_TRUE(arrivals.excludes(2));
    EXPECT_FALSE(arrivals.excludes(1));
    EXPECT_FALSE(arrivals.add(1));
    EXPECT_TRUE(arrivals.add(1));
    EXPECT_TRUE(arrivals.add(0));
    arrivals.end();
  }
  arrivals.begin();
  arrivals.add(0);
  EXPECT_THAT(error_of<UsageError>([&] { arrivals.add(0); }),
              HasSubstr("'first' got 2 gradients in one backward, but 1 in the first one"));
}

TEST(GradientArrivals, ABackwardThatWasInterruptedIsNotRecorded) {
  GradientArrivals arrivals(parameters(), 0, /*static_graph=*/true);
  arrivals.begin();
  arrivals.add(0);
  arrivals.begin();
  for (size_t parameter = 0; parameter < 3; ++parameter) arrivals.add(parameter);
  arrivals.end();
  arrivals.begin();
  EXPECT_TRUE(arrivals.add(2));
  EXPECT_THAT(arrivals.order(), ElementsAre(2));
}

}  // namespace
}  // namespace lockstep
