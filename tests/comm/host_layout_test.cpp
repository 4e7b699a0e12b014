#include "backends/hierarchical/host_layout.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace lockstep::hierarchical {
namespace {

using Ranks = std::vector<int>;

TEST(HostLayout, HostsAreNumberedByTheirFirstRanks) {
  HostLayout layout({"z", "z", "a", "a"});
  EXPECT_EQ(layout.ranks(), 4);
  EXPECT_EQ(layout.hosts(), 2);
  EXPECT_EQ(layout.ranks_of(0), (Ranks{0, 1})) << "z comes first";
  EXPECT_EQ(layout.ranks_of(1), (Ranks{2, 3}));
  EXPECT_EQ(layout.columns(), 2);
  EXPECT_TRUE(layout.is_even());
}

TEST(HostLayout, RanksOfAHostNeedNotBeNeighbours) {
  HostLayout layout({"a", "b", "c", "b", "a", "c"});
  EXPECT_EQ(layout.ranks_of(0), (Ranks{0, 4}));
  EXPECT_EQ(layout.ranks_of(1), (Ranks{1, 3}));
  EXPECT_EQ(layout.ranks_of(2), (Ranks{2, 5}));
  EXPECT_EQ(layout.host_of(3), 1);
  EXPECT_EQ(layout.local_index_of(3), 1);
  EXPECT_EQ(layout.host_of(4), 0);
  EXPECT_EQ(layout.local_index_of(4), 1);
  EXPECT_EQ(layout.columns(), 2);
  EXPECT_TRUE(layout.is_even());
}

TEST(HostLayout, TheSmallestHostSaysHowManyColumnsThereAre) {
  HostLayout layout({"a", "b", "a", "b", "a", "c", "c"});
  EXPECT_EQ(layout.ranks_of(0), (Ranks{0, 2, 4}));
  EXPECT_EQ(layout.local_index_of(4), 2);
  EXPECT_EQ(layout.columns(), 2);
  EXPECT_FALSE(layout.is_even());
  EXPECT_EQ(HostLayout({"a", "a", "b"}).columns(), 1);
}

TEST(HostLayout, EveryRankHasItsPlace) {
  HostLayout layout({"a", "b", "b", "a", "b", "c"});
  for (int rank = 0; rank < layout.ranks(); ++rank)
    EXPECT_EQ(layout.ranks_of(layout.host_of(rank))[layout.local_index_of(rank)], rank);
}

TEST(Columns, CutElementsIntoEqualPartsAndARest) {
  Columns columns(at::arange(11), 3);
  EXPECT_TRUE(at::equal(columns.part(0), at::arange(0, 3)));
  EXPECT_TRUE(at::equal(columns.part(2), at::arange(6, 9)));
  EXPECT_TRUE(at::equal(columns.all_parts(), at::arange(9)));
  EXPECT_TRUE(at::equal(columns.rest(), at::arange(9, 11)));
  EXPECT_EQ(columns.parts_of(1).size(), 2u);
}

TEST(Columns, FewerElementsThanColumnsAreAllRest) {
  Columns columns(at::arange(2), 3);
  EXPECT_FALSE(columns.has_parts());
  EXPECT_TRUE(at::equal(columns.rest(), at::arange(2)));
  EXPECT_EQ(columns.parts_of(0).size(), 1u);
}

TEST(Columns, SegmentsAreTheWholeTensorAndOnlyTheLastHasARest) {
  auto data = at::arange(100, at::kFloat);
  auto segments = cut_into_segments(data, 3, 32 * 4);  // 30 elements: what three columns share evenly
  ASSERT_EQ(segments.size(), 4u);
  std::vector<at::Tensor> all;
  for (size_t i = 0; i < segments.size(); ++i) {
    EXPECT_EQ(segments[i].has_rest(), i == 3);
    all.push_back(segments[i].all_parts());
  }
  all.push_back(segments.back().rest());
  EXPECT_EQ(all[0].numel(), 30);
  EXPECT_TRUE(at::equal(at::cat(all), data));
}

TEST(Columns, ASegmentHasAnElementForEveryColumnAtLeast) {
  EXPECT_EQ(cut_into_segments(at::arange(8), 4, 1).size(), 2u);
}

}  // namespace
}  // namespace lockstep::hierarchical
