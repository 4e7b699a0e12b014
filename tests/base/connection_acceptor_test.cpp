#include "base/connection_acceptor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::IsEmpty;

constexpr Strangers::Clock::time_point kStart{};

TEST(Strangers, OfTheAddressThatHasTheMostAreDisplacedTheOldestFirst) {
  Strangers strangers;
  strangers.add(2, "other", kStart);
  EXPECT_EQ(strangers.to_displace(), 2U);
  for (uint64_t number : {3, 4, 5}) strangers.add(number, "flood", kStart);
  for (uint64_t number : {3, 4}) {
    EXPECT_EQ(strangers.to_displace(), number);
    strangers.remove(number);
  }
  EXPECT_EQ(strangers.to_displace(), 2U) << "both have one";
  strangers.remove(2);
  strangers.remove(7);  // none
  EXPECT_EQ(strangers.size(), 1U);
  EXPECT_EQ(strangers.to_displace(), 5U);
}

TEST(Strangers, AreSlowFromTheTimeOfTheirConnection) {
  Strangers strangers;
  strangers.add(2, "a", kStart);
  strangers.add(3, "b", kStart + 1s);
  EXPECT_THAT(strangers.older_than(kStart), IsEmpty());
  EXPECT_THAT(strangers.older_than(kStart + 1s), ElementsAre(2));
  EXPECT_THAT(strangers.older_than(kStart + 2s), ElementsAre(2, 3));
}

}  // namespace
}  // namespace lockstep
