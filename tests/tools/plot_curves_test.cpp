// The parts of `lockstep plot`: axes, what a line shows of many points, averages, and names.

#include <cmath>
#include <limits>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include "plot/axis.h"
#include "plot/curve.h"
#include "plot/metrics_file.h"
#include "plot/run_names.h"
#include "support/watched_pipe.h"
#include "tools/plot_process.h"

namespace lockstep::plot {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> names_of(const Axis& axis) {
  std::vector<std::string> names;
  for (const auto& tick : axis.ticks()) names.push_back(tick.name);
  return names;
}

TEST(PlotAxis, HasRoundNumbersAroundTheValues) {
  EXPECT_THAT(names_of(Axis::vertical({0.07, 2.31}, {0, 1}, 5)), ElementsAre("0", "0.5", "1.0", "1.5", "2.0", "2.5"));
  EXPECT_THAT(names_of(Axis::vertical({0.83, 0.909}, {0, 1}, 5)),
              ElementsAre("0.82", "0.84", "0.86", "0.88", "0.90", "0.92"));
  EXPECT_THAT(names_of(Axis::vertical({-3, 4}, {0, 1}, 5)), ElementsAre("-4", "-2", "0", "2", "4"));
  EXPECT_THAT(names_of(Axis::vertical({0, 37000}, {0, 1}, 4)), ElementsAre("0", "10k", "20k", "30k", "40k"));
  EXPECT_THAT(names_of(Axis::vertical({-1e-5, 0}, {0, 1}, 2)), ElementsAre("-1e-5", "-5e-6", "0"));
  EXPECT_THAT(names_of(Axis::vertical({12345.678, 12345.682}, {0, 1}, 2)),
              ElementsAre("12345.678", "12345.680", "12345.682"));
}

TEST(PlotAxis, PutsAConstantIntoTheMiddle) {
  for (const double value : {0.0, 0.1, -3.0, 1e-9, 1e12}) {
    EXPECT_NEAR(Axis::vertical({value, value}, {100, 0}, 5).at(value), 50, 1e-6) << value;
    EXPECT_GE(Axis::vertical({value, value}, {100, 0}, 5).ticks().size(), 2U) << value;
  }
  EXPECT_NEAR(Axis::horizontal({50, 50}, {0, 100}, 5, 1).at(50), 50, 1e-6);
}

TEST(PlotAxis, StaysWithinItsBoundsForExtremeNumbers) {
  constexpr double kMost = std::numeric_limits<double>::max(), kLeast = std::numeric_limits<double>::denorm_min();
  for (const Axis::Range range : {Axis::Range{-kMost, kMost}, Axis::Range{kLeast, kLeast}, Axis::Range{0, kLeast},
                                  Axis::Range{kMost, kMost}, Axis::Range{1, 1 + 1e-15}})
    for (const bool is_logarithmic : {false, true}) {
      if (is_logarithmic && range.least <= 0) continue;
      const auto axis = is_logarithmic ? Axis::logarithmic(range, {100, 0}, 5) : Axis::vertical(range, {100, 0}, 5);
      EXPECT_LE(axis.ticks().size(), 12U);
      for (const double value : {range.least, range.largest})
        EXPECT_TRUE(axis.at(value) >= 0 && axis.at(value) <= 100) << value << " " << axis.at(value);
    }
}

TEST(PlotAxis, HasPowersOfTenIfLogarithmic) {
  const auto axis = Axis::logarithmic({0.0004, 8}, {0, 100}, 5);
  EXPECT_THAT(names_of(axis), ElementsAre("0.001", "0.01", "0.1", "1", "10"));
  EXPECT_NEAR(axis.at(0.1) - axis.at(0.01), axis.at(10) - axis.at(1), 1e-9);
  EXPECT_THAT(names_of(Axis::logarithmic({0.03, 0.4}, {0, 1}, 5)), ElementsAre("0.02", "0.05", "0.1", "0.2", "0.5"));
  EXPECT_THAT(names_of(Axis::logarithmic({2.1, 2.9}, {0, 1}, 5)),
              ElementsAre("2.0", "2.2", "2.4", "2.6", "2.8", "3.0"));
  EXPECT_THAT(names_of(Axis::logarithmic({1e-12, 1e6}, {0, 1}, 5)), ElementsAre("1e-12", "1e-8", "1e-4", "1", "10k"));
}

TEST(PlotAxis, CountsWholeStepsFromZero) {
  EXPECT_THAT(names_of(Axis::horizontal({50, 2345}, {0, 1}, 6, 1)), ElementsAre("0", "500", "1000", "1500", "2000"));
  EXPECT_THAT(names_of(Axis::horizontal({1, 3}, {0, 1}, 9, 1)), ElementsAre("1", "2", "3"));
  EXPECT_THAT(names_of(Axis::horizontal({0.2, 3}, {0, 1}, 9, 0)),
              ElementsAre("0", "0.5", "1.0", "1.5", "2.0", "2.5", "3.0"));
  EXPECT_THAT(names_of(Axis::horizontal({9000, 10000}, {0, 1}, 3, 1)), ElementsAre("9.0k", "9.5k", "10.0k"));
}

TEST(PlotAxis, NamesTimesInTheirUnit) {
  EXPECT_THAT(names_of(Axis::duration({0, 50}, {0, 1}, 6)), ElementsAre("0", "10 s", "20 s", "30 s", "40 s", "50 s"));
  EXPECT_THAT(names_of(Axis::duration({1, 1000}, {0, 1}, 4)), ElementsAre("0", "5 min", "10 min", "15 min"));
  EXPECT_THAT(names_of(Axis::duration({10, 3 * 3600}, {0, 1}, 4)), ElementsAre("0", "1 h", "2 h", "3 h"));
  EXPECT_THAT(names_of(Axis::duration({10, 9 * 86400}, {0, 1}, 5)), ElementsAre("0", "2 d", "4 d", "6 d", "8 d"));
}

// --- lines

svg::Point in_place(double x, double y) {
  return {x, y};
}

TEST(PlotLine, KeepsTheLowestAndTheHighestPointOfEachColumn) {
  std::mt19937 random(7);
  std::normal_distribution<double> value;
  std::vector<double> x, y;
  std::map<int, std::pair<double, double>> extremes;
  for (int i = 0; i < 20000; ++i) {
    x.push_back(i / 200.0);
    y.push_back(value(random));
    auto& [low, high] = extremes.try_emplace(i / 200, y.back(), y.back()).first->second;
    low = std::min(low, y.back());
    high = std::max(high, y.back());
  }
  const auto lines = visible_lines(x, y, in_place);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_LE(lines[0].size(), 2 * extremes.size() + 2);
  std::map<int, std::pair<double, double>> shown;
  double last = -1;
  for (const auto& point : lines[0]) {
    EXPECT_GE(point.x, last);
    last = point.x;
    auto& [low, high] = shown.try_emplace(static_cast<int>(point.x), point.y, point.y).first->second;
    low = std::min(low, point.y);
    high = std::max(high, point.y);
  }
  EXPECT_EQ(shown, extremes);
  EXPECT_EQ(lines[0].front().x, x.front());
  EXPECT_EQ(lines[0].back().x, x.back());
}

TEST(PlotLine, ShowsEveryPointThatHasItsOwnColumn) {
  const auto lines = visible_lines({1, 2.5, 3.2, 4.9}, {1, 5, 2, 2}, in_place);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].size(), 4U);
}

TEST(PlotLine, BreaksAtGapsThatAreWideEnoughToSee) {
  std::vector<size_t> sizes;
  for (const auto& line : visible_lines({1, 2, 3, 4, 5, 6, 6.4, 6.8}, {kNan, 1, kNan, 1, 1, 1, kNan, 1}, in_place))
    sizes.push_back(line.size());
  EXPECT_THAT(sizes, ElementsAre(1, 4));
  EXPECT_THAT(visible_lines({1, 2}, {kNan, kNan}, in_place), IsEmpty());
  EXPECT_THAT(visible_lines({}, {}, in_place), IsEmpty());
  std::vector<double> x, y;  // many gaps, but few columns
  for (int i = 0; i < 100000; ++i) {
    x.push_back(i / 1000.0);
    y.push_back(i % 2 == 0 ? 1 : kNan);
  }
  EXPECT_LE(visible_lines(x, y, in_place).size(), 101U);
}

TEST(PlotLine, HasMarkersThatDoNotTouch) {
  Line line;
  for (int i = 0; i < 100; ++i) line.push_back({i * 2.0, 0});
  const auto marked = marked_points(line, 9);
  EXPECT_EQ(marked.front().x, 0);
  for (size_t i = 1; i < marked.size(); ++i) EXPECT_EQ(marked[i].x - marked[i - 1].x, 10);
}

// --- averages

TEST(PlotAverage, SkipsValuesThatAreNotFinite) {
  const auto average = smoothed({1, kNan, 3}, 0.5);
  EXPECT_DOUBLE_EQ(average[0], 1);
  EXPECT_TRUE(std::isnan(average[1]));
  EXPECT_DOUBLE_EQ(average[2], (0.5 * 1 + 3) / 1.5);
  EXPECT_THAT(smoothed({4, 4, 4}, 0.9), testing::Each(testing::DoubleNear(4, 1e-12)));
  EXPECT_THAT(smoothed({1, 2, 3}, 0), ElementsAre(1, 2, 3));
}

TEST(PlotAverage, OfManyPointsIsOverEquallyMany) {
  const Series series{{1, 2, 3, 4, 5, 6, 7}, {1, 3, kNan, 7, kNan, kNan, 5}};
  const auto average = means(series, 4);
  EXPECT_THAT(average.x, ElementsAre(1.5, 4, 5, 7));
  EXPECT_THAT(average.y, ElementsAre(2, 7, testing::IsNan(), 5));
  EXPECT_EQ(means(series, 7).x, series.x);
}

TEST(PlotAverage, IsForNoiseOnly) {
  std::vector<double> loss, rate, constant;
  for (int i = 0; i < 200; ++i) {
    loss.push_back(std::exp(-i / 50.0) + 0.1 * ((i * 7919) % 13));
    rate.push_back(i < 20 ? i / 20.0 : 0.5 + 0.5 * std::cos((i - 20) / 180.0 * M_PI));
    constant.push_back(0.1);
  }
  EXPECT_TRUE(is_noisy(loss));
  EXPECT_FALSE(is_noisy(rate));
  EXPECT_FALSE(is_noisy(constant));
  EXPECT_FALSE(is_noisy({}));
  EXPECT_FALSE(is_noisy({1, 2, 1, 2}));
}

TEST(PlotAverage, IsNotForSchedules) {
  for (const auto* name : {"lr", "lr_0", "group_1/lr", "train.lr", "learning_rate", "sgd/momentum", "weight_decay"})
    EXPECT_TRUE(is_schedule(name)) << name;
  for (const auto* name : {"", "loss", "lrs", "allreduce", "error_rate", "clr loss", "accuracy"})
    EXPECT_FALSE(is_schedule(name)) << name;
}

// --- names

TEST(PlotNames, HaveAsManyPartsOfThePathAsAreNeeded) {
  EXPECT_THAT(names_of_runs({"runs/a", "runs/b/"}), ElementsAre("a", "b"));
  EXPECT_THAT(names_of_runs({"/x/1/a", "/y/1/a", "/y/2/a", "c"}), ElementsAre("x/1/a", "y/1/a", "2/a", "c"));
  EXPECT_THAT(names_of_runs({"/a", "/b/a"}), ElementsAre("a", "b/a"));
  EXPECT_THAT(names_of_runs({"/runs/a/metrics.jsonl", "/runs/b/old.jsonl"}), ElementsAre("a", "old.jsonl"));
  EXPECT_THAT(names_of_runs({"/", "/runs/x/../b/."}), ElementsAre("/", "b"));
}

TEST(PlotNames, AreShortenedInTheMiddle) {
  EXPECT_EQ(shortened("abcdefghij", 10), "abcdefghij");
  EXPECT_EQ(shortened("abcdefghij", 5), "ab\u2026ij");
  EXPECT_EQ(shortened("\u00e4\u00f6\u00fc\u00e4\u00f6\u00fc", 3), "\u00e4\u2026\u00fc");
}

TEST(PlotNames, StayDifferentWhenTheyAreShortened) {
  const auto in_the_middle = shortened_distinctly({"aaaaaa1bbbbbb", "aaaaaa2bbbbbb"}, 5);
  EXPECT_NE(in_the_middle[0], in_the_middle[1]);
  EXPECT_THAT(shortened_distinctly({"resnet50-imagenet-lr0.1-seed0", "resnet50-imagenet-lr0.2-seed0"}, 25),
              ElementsAre("resnet50\u2026lr0.1-seed0", "resnet50\u2026lr0.2-seed0"));
  EXPECT_THAT(shortened_distinctly({"a-long-name-with-decay-1e-4", "a-long-name-with-decay-1e-5"}, 20),
              ElementsAre("a-long-n\u20261e-4", "a-long-n\u20261e-5"));
  EXPECT_THAT(shortened_distinctly({"a", "b"}, 5), ElementsAre("a", "b"));
}

// --- a file that is being written

using PlotMetricsFile = PlotCommand;

TEST_F(PlotMetricsFile, CanBeReadAtAnyTimeWhileTheRunWritesIt) {
  const auto text = lines_of({step_record(1, {{"loss", 2.5}}), step_record(2, {{"loss", 1.5}})});
  const auto first_line = text.find('\n');
  for (size_t size = 0; size <= text.size(); ++size) {
    write("metrics.jsonl", text.substr(0, size));
    const size_t complete = size >= text.size() - 1 ? 2 : size >= first_line ? 1 : 0;
    EXPECT_EQ(read_metrics(path("metrics.jsonl"), XAxis::kStep).records, complete) << size;
  }
}

TEST_F(PlotMetricsFile, TakesBlankLinesAndRecordsWithDifferentMetrics) {
  write("metrics.jsonl", "\r\n" + step_record(1, {{"a", 1}, {"b", nullptr}}).dump() + "\r\n\n" +
                             epoch_record(1, {{"a", -2e3}, {"c", 3}}).dump() + "\n");
  const auto run = read_metrics(path("metrics.jsonl"), XAxis::kTime);
  ASSERT_EQ(run.metrics.size(), 3U);
  EXPECT_THAT(run.find("a")->steps.x, ElementsAre(1.5));
  EXPECT_THAT(run.find("a")->epochs.x, ElementsAre(150));
  EXPECT_THAT(run.find("a")->epochs.y, ElementsAre(-2000));
  EXPECT_THAT(run.find("b")->steps.y, ElementsAre(testing::IsNan()));
  EXPECT_TRUE(run.find("c")->steps.empty());
  EXPECT_EQ(run.find("d"), nullptr);
  EXPECT_THROW(read_metrics(path("missing"), XAxis::kStep), SystemError);
}

TEST_F(PlotMetricsFile, MayBeALinkButNoPipe) {
  write("metrics.jsonl", step_record(1, {{"loss", 2.5}}).dump() + "\n");
  std::filesystem::create_symlink("metrics.jsonl", path("link"));
  EXPECT_EQ(read_metrics(path("link"), XAxis::kStep).records, 1U);
  const WatchedPipe pipe(path("pipe"));
  for (const char* name : {"pipe", "."}) {
    try {
      read_metrics(path(name), XAxis::kStep);
      FAIL() << name;
    } catch (const SystemError& error) {
      EXPECT_THAT(error.what(), testing::EndsWith("it is not a regular file. Copy the records into a file first."))
          << name;
    }
  }
  EXPECT_FALSE(pipe.was_opened());
}

}  // namespace
}  // namespace lockstep::plot
