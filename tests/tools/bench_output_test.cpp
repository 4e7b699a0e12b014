#include <algorithm>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "bench/collective_report.h"
#include "bench/plot.h"

namespace lockstep::bench {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

CollectivePlan two_backends() {
  CollectivePlan plan;
  plan.backends = {"shm", "gloo"};
  plan.sizes = {4, 26214400};
  return plan;
}

CollectiveRow row(const std::string& backend, const std::string& memory, int64_t bytes, double time_us) {
  CollectiveRow row;
  row.backend = backend;
  row.memory = memory;
  row.bytes = bytes;
  row.count = bytes / 4;
  row.dtype = "float32";
  row.redop = "sum";
  row.time_us = time_us;
  row.p10_us = time_us * 0.9;
  row.p90_us = time_us * 1.2;
  row.wrong = 0;
  row.floor_us = 0.1;
  row.floor_fraction = 0.1 / time_us;
  return row;
}

std::vector<CollectiveRow> some_rows() {
  return {row("shm", "allocated", 4, 0.25),       row("shm", "ordinary", 4, 0.5),
          row("gloo", "ordinary", 4, 250),        row("shm", "allocated", 26214400, 1000),
          row("shm", "ordinary", 26214400, 2000), row("gloo", "ordinary", 26214400, 20000)};
}

TEST(BenchTable, ItsLinesAreAsWideForEveryRow) {
  const CollectiveTable table(two_backends());
  auto slow = row("gloo", "ordinary", int64_t{1} << 30, 1234567);
  slow.wrong.reset();
  slow.floor_fraction.reset();
  std::istringstream header(table.header());
  std::string first, second;
  std::getline(header, first);
  std::getline(header, second);
  EXPECT_EQ(first.size(), second.size());
  EXPECT_LE(first.size(), 110U);
  for (const auto& each : {row("shm", "allocated", 4, 0.25), slow})
    EXPECT_EQ(table.line(each).size(), first.size() + 1) << table.line(each);
  EXPECT_THAT(table.line(slow), HasSubstr("N/A"));
}

TEST(BenchTable, ComparesTheFirstWithEachOther) {
  EXPECT_EQ(ratio_table(some_rows()),
            "#\n"
            "# times relative to shm, allocated\n"
            "#       size  shm, ordinary  gloo, ordinary\n"
            "           4          2.00x           1000x\n"
            "         25M          2.00x           20.0x\n");
  EXPECT_EQ(ratio_table({row("gloo", "ordinary", 4, 1)}), "");
}

struct Printed {
  std::ostringstream out, progress;
};

void tell(CollectivePrinter& printer, std::optional<int64_t> wrong) {
  printer.handle(RoundTripTimes{{0.2}});
  printer.handle(SizeStarted{4});
  printer.handle(StreamTimes{4, {0.01}});
  printer.handle(CollectiveSamples{"shm", "allocated", 4, 64, 0, {1, 1, 1}});
  printer.handle(CollectiveSamples{"gloo", "ordinary", 4, 64, wrong, {100, 100, 100}});
  printer.finish();
}

TEST(BenchPrinter, PrintsTheTableAndHowBackendsCompare) {
  Printed printed;
  CollectivePrinter printer(two_backends(), {}, printed.out, printed.progress);
  tell(printer, 0);
  EXPECT_THAT(printed.out.str(), testing::StartsWith("# round trip of a flag between two ranks: 0.200 us\n#"));
  EXPECT_THAT(printed.out.str(), HasSubstr("# 3 rounds per size; all correct\n"));
  EXPECT_THAT(printed.out.str(), testing::EndsWith("          100x\n"));
  EXPECT_EQ(printed.progress.str(), "");
  EXPECT_FALSE(printer.has_wrong());
}

TEST(BenchPrinter, SaysThatResultsAreWrong) {
  Printed printed;
  CollectivePrinter printer(two_backends(), {}, printed.out, printed.progress);
  tell(printer, 7);
  EXPECT_TRUE(printer.has_wrong());
  EXPECT_THAT(printed.out.str(), HasSubstr("SOME RESULTS ARE WRONG"));
}

TEST(BenchPrinter, SaysThatResultsAreNotChecked) {
  Printed printed;
  auto plan = two_backends();
  plan.check = false;
  CollectivePrinter printer(plan, {}, printed.out, printed.progress);
  tell(printer, std::nullopt);
  EXPECT_THAT(printed.out.str(), HasSubstr("# 3 rounds per size; results not checked\n"));
  EXPECT_FALSE(printer.has_wrong());
}

TEST(BenchPrinter, RewritesOneLineWhileItGoesOn) {
  Printed printed;
  CollectivePrinter printer(two_backends(), {.json = true, .shows_progress = true}, printed.out, printed.progress);
  tell(printer, 0);
  EXPECT_THAT(printed.progress.str(), HasSubstr("\r\033[Kall-reduce 1 of 2: 4 bytes"));
  EXPECT_THAT(printed.progress.str(), testing::EndsWith("\r\033[K"));
  EXPECT_THAT(printed.progress.str(), Not(HasSubstr("\n")));
}

std::vector<std::string> names_of(const LogAxis& axis) {
  std::vector<std::string> names;
  for (const auto& tick : axis.ticks()) names.push_back(tick.name);
  return names;
}

TEST(BenchAxis, NamesPowersOfTwo) {
  const auto axis = LogAxis::of_bytes(4, 256 << 20, {0, 260});
  EXPECT_THAT(names_of(axis), ElementsAre("4 B", "64 B", "1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB"));
  EXPECT_DOUBLE_EQ(axis.at(4), 0);
  EXPECT_DOUBLE_EQ(axis.at(256 << 20), 260);
  EXPECT_NEAR(axis.at(8), 10, 1e-9);
  EXPECT_NEAR(LogAxis::of_bytes(64, 64, {0, 100}).at(64), 50, 1e-9);
}

TEST(BenchAxis, NamesPowersOfTen) {
  EXPECT_THAT(names_of(LogAxis::of_microseconds(0.13, 56000, {0, 1})),
              ElementsAre("100 ns", "1 \u00b5s", "10 \u00b5s", "100 \u00b5s", "1 ms", "10 ms", "100 ms"));
  EXPECT_THAT(names_of(LogAxis::of_microseconds(300, 1500, {0, 1})),
              ElementsAre("200 \u00b5s", "500 \u00b5s", "1 ms", "2 ms"));
  const auto axis = LogAxis::of_microseconds(0, 0, {0, 1});  // what has no logarithm
  EXPECT_GE(axis.at(0), 0);
}

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = 0; (at = text.find(part, at)) != text.npos; at += part.size()) ++count;
  return count;
}

TEST(BenchPlot, HasALineForEachSeriesAndTheFloor) {
  const auto svg = plot_svg(some_rows(), {"title", "where"});
  EXPECT_THAT(svg, HasSubstr("prefers-color-scheme: dark"));
  EXPECT_THAT(svg, HasSubstr("[fill=\"white\"] { fill: #0d1117 }"));
  EXPECT_EQ(count_of(svg, "<polyline"), 4U);
  EXPECT_EQ(count_of(svg, "<polygon"), 3U);
  EXPECT_EQ(count_of(svg, "stroke-dasharray"), 2U);  // the floor, and in the legend
  EXPECT_EQ(count_of(svg, "<circle"), 9U);           // six rows, and three in the legend
  for (const char* text : {">title<", ">where<", ">message size (bytes)<", ">time of a call (seconds)<",
                           ">shm, allocated<", ">shm, ordinary<", ">gloo, ordinary<", ">floor<", ">4 B<", ">1 ms<"})
    EXPECT_THAT(svg, HasSubstr(text));
}

TEST(BenchPlot, NamesTheSlowestFirstBesideTheLines) {
  const auto svg = plot_svg(some_rows(), {});
  EXPECT_LT(svg.find(">gloo, ordinary<"), svg.find(">shm, ordinary<"));
  EXPECT_LT(svg.find(">shm, ordinary<"), svg.find(">shm, allocated<"));
}

TEST(BenchPlot, IsAsWideAsItsLongestName) {
  const auto width_of = [](const std::string& backend) {
    double width = 0;
    const auto svg = plot_svg({row(backend, "ordinary", 4, 1)}, {});
    EXPECT_EQ(std::sscanf(svg.c_str() + svg.find("viewBox="), "viewBox=\"0 0 %lf", &width), 1);
    return width;
  };
  EXPECT_GT(width_of("hierarchical"), 754 + 42 + 8 * 22);
  EXPECT_GT(width_of("a backend with a long name"), width_of("hierarchical") + 100);
}

TEST(BenchPlot, KeepsEveryPointInItsArea) {
  auto rows = some_rows();
  rows.push_back(row("shm", "allocated", 64 << 20, 0));  // a clock that did not move
  const auto svg = plot_svg(rows, {});
  double x = 0, y = 0;
  size_t points = 0;
  for (size_t at = 0; (at = svg.find("<circle cx=\"", at)) != svg.npos; ++at) {
    ASSERT_EQ(std::sscanf(svg.c_str() + at, "<circle cx=\"%lf\" cy=\"%lf\"", &x, &y), 2);
    EXPECT_TRUE(x >= 92 && x <= 960 && y >= 84 && y <= 504) << x << ", " << y;
    ++points;
  }
  EXPECT_EQ(points, 10U);
  EXPECT_THAT(svg, Not(HasSubstr("nan")));
  EXPECT_THAT(svg, Not(HasSubstr("inf")));
}

TEST(BenchPlot, EscapesWhatXmlWouldRead) {
  const auto svg = plot_svg({row("a<b>&c", "ordinary", 4, 1)}, {});
  EXPECT_THAT(svg, HasSubstr("a&lt;b&gt;&amp;c, ordinary"));
  EXPECT_THAT(svg, Not(HasSubstr("a<b>")));
}

}  // namespace
}  // namespace lockstep::bench
