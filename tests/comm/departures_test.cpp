#include "comm/group/departures.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "base/error.h"

namespace lockstep::detail {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// Three ranks, which are ranks 4, 5 and 6 of the job.
Membership three_ranks() {
  Membership group;
  group.name = "world/1";
  group.size = 3;
  group.peers.resize(3);
  for (int rank = 0; rank < 3; ++rank) group.peers[rank].rank = 4 + rank;
  return group;
}

TEST(Departures, TheFirstCallThatARankDoesNotMakeFails) {
  const auto group = three_ranks();
  Departures departures(group);
  EXPECT_FALSE(departures.any());
  EXPECT_FALSE(departures.failure_of({1}));
  departures.add(1, 7);
  EXPECT_TRUE(departures.any());
  EXPECT_FALSE(departures.failure_of({7}));
  const auto cause = departures.failure_of({8});
  ASSERT_TRUE(cause);
  EXPECT_TRUE(is_a<PeerError>(cause));
  EXPECT_THAT(message_of(cause), AllOf(HasSubstr("rank 1 "), HasSubstr("has left group 'world/1' after 7 calls"),
                                       HasSubstr("this is call 8")));
  EXPECT_EQ(culprit_of(cause), (Culprit{5, CulpritRole::kLeft}));
}

TEST(Departures, TheRankThatMadeTheFewestCallsIsBlamed) {
  const auto group = three_ranks();
  for (const bool is_known_first : {true, false}) {
    Departures departures(group);
    if (is_known_first) departures.add(2, 3);
    departures.add(1, 7);
    if (!is_known_first) departures.add(2, 3);
    EXPECT_THAT(message_of(departures.failure_of({8})), HasSubstr("rank 2 "));
    EXPECT_FALSE(departures.failure_of({3}));
  }
}

// It may have been sent before.
TEST(Departures, AMessageCanStillArrive) {
  const auto group = three_ranks();
  Departures departures(group);
  departures.add(1, 0);
  EXPECT_FALSE(departures.failure_of({1, MessageRoute{1, 0, 0}}));
}

TEST(Departures, KnowsWhenARankIsAlone) {
  const auto group = three_ranks();
  Departures departures(group);
  departures.add(1, 0);
  departures.add(1, 0);
  EXPECT_FALSE(departures.all_others_left());
  departures.add(2, 0);
  EXPECT_TRUE(departures.all_others_left());
}

}  // namespace
}  // namespace lockstep::detail
