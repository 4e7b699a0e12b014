// Buckets and smoothing.

#include "ui/curve.h"

#include <cmath>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace lockstep::ui {
namespace {

using testing::DoubleNear;
using testing::Each;
using testing::ElementsAre;
using testing::ElementsAreArray;
using testing::Le;
using testing::SizeIs;

constexpr double kWhole = std::numeric_limits<double>::quiet_NaN();

/// A table with one metric whose values are at steps 1, 2, 3 and so on.
RecordTable table_of(const std::vector<double>& values) {
  RecordTable table;
  table.columns.resize(1);
  for (size_t i = 0; i < values.size(); ++i) {
    table.step.push_back(static_cast<double>(i + 1));
    table.epoch.push_back(static_cast<double>(i) / 100);
    table.seconds.push_back(static_cast<double>(i) * 2);
    table.columns[0].rows.push_back(static_cast<uint32_t>(i));
    table.columns[0].values.push_back(values[i]);
  }
  return table;
}

CurveRequest whole(size_t buckets, double smoothing = 0) {
  return {.from = kWhole, .to = kWhole, .buckets = buckets, .smoothing = smoothing};
}

TEST(Curve, OfFewPointsHasThemAll) {
  const auto curve = curve_of(table_of({3, 1, 2}), 0, whole(100));
  EXPECT_THAT(curve.x, ElementsAre(1, 2, 3));
  EXPECT_THAT(curve.low, ElementsAre(3, 1, 2));
  EXPECT_THAT(curve.high, ElementsAre(3, 1, 2));
  EXPECT_EQ(curve.points, 3U);
  EXPECT_EQ(curve.last, 2);
  EXPECT_EQ(curve.lowest, 1);
  EXPECT_EQ(curve.highest, 3);
}

TEST(Curve, KeepsEverySpikeInItsBuckets) {
  std::vector<double> values(100000, 1.0);
  values[12345] = 99;
  values[67890] = -99;
  const auto curve = curve_of(table_of(values), 0, whole(500));
  EXPECT_THAT(curve.x, SizeIs(testing::AllOf(testing::Ge(450U), Le(502U))));
  EXPECT_EQ(*std::max_element(curve.high.begin(), curve.high.end()), 99);
  EXPECT_EQ(*std::min_element(curve.low.begin(), curve.low.end()), -99);
  EXPECT_EQ(std::count(curve.high.begin(), curve.high.end(), 99), 1);
  EXPECT_TRUE(std::is_sorted(curve.x.begin(), curve.x.end()));
}

TEST(Curve, OfAPartHasItsNeighbours) {
  auto request = whole(100);
  request.from = 2.5;
  request.to = 4.5;
  const auto curve = curve_of(table_of({1, 2, 3, 4, 5, 6}), 0, request);
  EXPECT_THAT(curve.x, ElementsAre(2, 3, 4, 5));
  EXPECT_EQ(curve.points, 6U);
  request.from = 3.2;
  request.to = 3.4;  // between two points
  EXPECT_THAT(curve_of(table_of({1, 2, 3, 4, 5, 6}), 0, request).x, ElementsAre(3, 4));
  request.from = 100;
  request.to = 200;
  EXPECT_THAT(curve_of(table_of({1, 2, 3}), 0, request).x, SizeIs(0));
}

TEST(Curve, IsSmoothedAsTheDebiasedMeanOfAllValuesSoFar) {
  const std::vector<double> values{4, 8, kWhole, 0};
  const auto curve = curve_of(table_of(values), 0, whole(100, 0.5));
  const double second = (0.5 * 4 + 8) / 1.5, third = (0.25 * 4 + 0.5 * 8 + 0) / 1.75;
  ASSERT_THAT(curve.smooth, SizeIs(4));
  EXPECT_THAT(curve.smooth[0], DoubleNear(4, 1e-12));
  EXPECT_THAT(curve.smooth[1], DoubleNear(second, 1e-12));
  EXPECT_TRUE(std::isnan(curve.smooth[2]));
  EXPECT_THAT(curve.smooth[3], DoubleNear(third, 1e-12));
}

TEST(Curve, IsSmoothedIndependentlyOfThePartThatIsShown) {
  std::vector<double> values;
  for (int i = 0; i < 1000; ++i) values.push_back(i % 7);
  const auto all = curve_of(table_of(values), 0, whole(100000, 0.9));
  auto request = whole(100000, 0.9);
  request.from = 900;
  request.to = 902;
  const auto part = curve_of(table_of(values), 0, request);
  EXPECT_THAT(part.smooth, ElementsAreArray(all.smooth.begin() + 898, all.smooth.begin() + 903));
}

TEST(Curve, HasBucketsOfEqualWidthOnALogarithmicAxis) {
  auto request = whole(4);
  request.is_x_logarithmic = true;
  const auto curve = curve_of(table_of(std::vector<double>(10000, 1.0)), 0, request);
  ASSERT_THAT(curve.x, SizeIs(5));  // the last point is a bucket of its own
  EXPECT_THAT(curve.x, ElementsAre(9, 99, 999, 9999, 10000));
}

TEST(Curve, OfRecordsWithoutPositionOrMetricIsEmpty) {
  auto table = table_of({1, 2});
  EXPECT_THAT(curve_of(table, 1, whole(10)).x, SizeIs(0));
  EXPECT_THAT(curve_of(table, -1, whole(10)).x, SizeIs(0));
  table.step = {kWhole, kWhole};
  EXPECT_THAT(curve_of(table, 0, whole(10)).x, SizeIs(0));
  auto request = whole(10);
  request.x = XAxis::kTime;
  EXPECT_THAT(curve_of(table, 0, request).x, ElementsAre(0, 2));
}

}  // namespace
}  // namespace lockstep::ui
