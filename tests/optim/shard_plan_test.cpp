#include "optim/zero/shard_plan.h"

#include <numeric>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::detail {
namespace {

using testing::ElementsAre;

/// Parameters with a storage for each.
std::vector<ParameterRange> apart(const std::vector<int64_t>& sizes) {
  std::vector<ParameterRange> ranges;
  for (size_t i = 0; i < sizes.size(); ++i) ranges.push_back({static_cast<int64_t>(i), 0, sizes[i]});
  return ranges;
}

TEST(ShardPlan, CutsElementsIntoEqualRanges) {
  const auto plan = plan_shards(apart({10, 3, 20}), 2, ShardBy::kElements, 4);
  EXPECT_THAT(plan.offsets, ElementsAre(0, 12, 16));
  EXPECT_THAT(plan.begins, ElementsAre(0, 20, 40));
  EXPECT_TRUE(plan.is_even());
  EXPECT_THAT(pieces_of(plan, {10, 3, 20}, 0),
              ElementsAre(ShardPiece{0, 0, 10}, ShardPiece{1, 0, 3}, ShardPiece{2, 0, 4}));
  EXPECT_THAT(pieces_of(plan, {10, 3, 20}, 1), ElementsAre(ShardPiece{2, 4, 16}));
}

TEST(ShardPlan, KeepsParametersWholeTheLargestFirst) {
  const std::vector<int64_t> sizes{4, 10, 6, 9};
  const auto plan = plan_shards(apart(sizes), 2, ShardBy::kParameters, 1);
  EXPECT_THAT(pieces_of(plan, sizes, 0), ElementsAre(ShardPiece{0, 0, 4}, ShardPiece{1, 0, 10}));
  EXPECT_THAT(pieces_of(plan, sizes, 1), ElementsAre(ShardPiece{2, 0, 6}, ShardPiece{3, 0, 9}));
  EXPECT_THAT(plan.begins, ElementsAre(0, 14, 29));
  EXPECT_FALSE(plan.is_even());
  EXPECT_THAT(plan.offsets, ElementsAre(0, 4, 14, 20));
}

TEST(ShardPlan, ParametersOfOneStorageKeepTheirDistances) {
  const std::vector<ParameterRange> parameters{{0, 10, 5}, {1, 0, 3}, {0, 0, 10}, {0, 16, 4}};
  const auto plan = plan_shards(parameters, 2, ShardBy::kElements, 4);
  EXPECT_THAT(plan.offsets, ElementsAre(10, 20, 0, 16));
  EXPECT_THAT(plan.begins, ElementsAre(0, 12, 24));
  EXPECT_THAT(pieces_of(plan, {5, 3, 10, 4}, 0), ElementsAre(ShardPiece{0, 0, 2}, ShardPiece{2, 0, 10}));
  EXPECT_THAT(plan_shards(parameters, 2, ShardBy::kParameters, 1).begins, ElementsAre(0, 10, 22))
      << "tensors are assigned one by one";
}

TEST(ShardPlan, ParametersThatOverlapOrLieFarApartArePlacedOneByOne) {
  EXPECT_THAT(plan_shards({{0, 0, 8}, {0, 4, 8}}, 1, ShardBy::kElements, 4).offsets, ElementsAre(0, 8));
  EXPECT_THAT(plan_shards({{0, 0, 8}, {0, 800, 8}}, 1, ShardBy::kElements, 4).offsets, ElementsAre(0, 8));
}

/// Whatever the sizes: every element has one owner, no parameters overlap, and all begin where they should.
TEST(ShardPlan, GivesEveryElementOneOwner) {
  const std::vector<std::vector<int64_t>> models{{1}, {0, 5, 0}, {100, 1, 1, 1}, {7, 7, 7, 7, 7, 7, 7}, {3, 1000, 2}};
  for (const auto& sizes : models)
    for (int ranks : {1, 2, 3, 8})
      for (auto by : {ShardBy::kElements, ShardBy::kParameters})
        for (int64_t alignment : {1, 16}) {
          const auto plan = plan_shards(apart(sizes), ranks, by, alignment);
          std::vector<std::vector<int>> owners(sizes.size());
          for (size_t i = 0; i < sizes.size(); ++i) {
            owners[i].resize(sizes[i]);
            EXPECT_EQ(plan.offsets[i] % alignment, 0);
            for (size_t other = 0; other < i; ++other)
              EXPECT_TRUE(plan.offsets[i] >= plan.offsets[other] + sizes[other] ||
                          plan.offsets[other] >= plan.offsets[i] + sizes[i]);
            EXPECT_LE(plan.offsets[i] + sizes[i], plan.elements());
          }
          for (int rank = 0; rank < ranks; ++rank)
            for (const auto& piece : pieces_of(plan, sizes, rank)) {
              EXPECT_GT(piece.size, 0);
              EXPECT_GE(plan.offsets[piece.parameter] + piece.begin, plan.begins[rank]);
              EXPECT_LE(plan.offsets[piece.parameter] + piece.begin + piece.size, plan.begins[rank + 1]);
              for (int64_t i = 0; i < piece.size; ++i) ++owners[piece.parameter][piece.begin + i];
            }
          for (const auto& parameter : owners)
            for (int count : parameter) EXPECT_EQ(count, 1);
        }
}

TEST(ShardPlan, SharesAreEqualUpToTheGaps) {
  const std::vector<int64_t> sizes{50304 * 768, 768, 768 * 768, 3};
  const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
  for (int ranks : {2, 3, 7})
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t mine = 0;
      for (const auto& piece : pieces_of(plan_shards(apart(sizes), ranks, ShardBy::kElements, 128), sizes, rank))
        mine += piece.size;
      EXPECT_NEAR(static_cast<double>(mine), static_cast<double>(all) / ranks, 128 * 8);
    }
}

}  // namespace
}  // namespace lockstep::detail
