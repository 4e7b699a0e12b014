#include <lockstep/progress.h>

#include <wchar.h>

#include <algorithm>
#include <clocale>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>
#include <lockstep/run_threads.h>

#include "report/progress_line.h"
#include "report/progress_state.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::Not;
using testing::StartsWith;

// --- the line

/// A bar that has everything a line can show.
ProgressView full_view() {
  ProgressView view;
  view.title = "epoch 3/20";
  view.done = 120;
  view.total = 469;
  view.values = {{"loss", "0.4321"}, {"lr", "0.1"}};
  view.steps_per_second = 8.5;
  view.samples_per_second = 12300;
  view.waiting = 0.034;
  view.left = 41s;
  view.elapsed = 14s;
  return view;
}

std::string live(const ProgressView& view, size_t columns, bool has_unicode = true) {
  return render_live(view, {.columns = columns, .has_colour = false, .has_unicode = has_unicode});
}

TEST(ProgressLine, ShowsEverythingWhereThereIsRoom) {
  EXPECT_EQ(
      live(full_view(), 120),
      "epoch 3/20  120/469  ━━━━━━━╸──────────────────────   25 %  loss 0.4321  lr 0.1  12.3k samples/s  data 3 %  "
      "eta 0:41");
}

TEST(ProgressLine, NeverTakesMoreColumnsThanThereAre) {
  auto long_title = full_view();
  long_title.title = "a title that is longer than many terminals, with 漢字 that take two columns each";
  for (const auto& view : {full_view(), long_title})
    for (bool has_colour : {false, true})
      for (bool has_unicode : {false, true})
        for (size_t columns = 1; columns <= 200; ++columns)
          EXPECT_LE(display_width(render_live(view, {columns, has_colour, has_unicode})), columns) << columns;
}

TEST(ProgressLine, DropsThePartsInTheStatedOrder) {
  const std::vector<std::string> order{"%  loss", "data", "lr", "samples/s", "━", "eta", "loss", "epoch"};
  size_t dropped = 0;
  for (size_t columns = 200; columns >= 7; --columns) {
    const auto line = live(full_view(), columns);
    while (dropped < order.size() && line.find(order[dropped]) == line.npos) ++dropped;
    for (size_t part = dropped; part < order.size(); ++part)
      EXPECT_THAT(line, HasSubstr(order[part])) << "at " << columns << " columns " << order[part] << " is too early";
    for (size_t part = 0; part < dropped; ++part)
      EXPECT_THAT(line, Not(HasSubstr(order[part]))) << "at " << columns << " columns " << order[part] << " is back";
    EXPECT_THAT(line, HasSubstr("120/469"));
  }
  EXPECT_EQ(dropped, order.size());
  EXPECT_EQ(live(full_view(), 4), "120/");
}

TEST(ProgressLine, ShrinksTheBarBeforeAnythingIsDropped) {
  auto bar_of = [](const std::string& line) {
    size_t columns = 0;
    for (const std::string cell : {"━", "╸", "─"})
      for (size_t at = 0; (at = line.find(cell, at)) != line.npos; ++at) ++columns;
    return columns;
  };
  const size_t without_bar = display_width(live(full_view(), 200)) - bar_of(live(full_view(), 200));
  for (size_t bar = 8; bar <= 30; ++bar) {
    const auto line = live(full_view(), without_bar + bar);
    EXPECT_EQ(bar_of(line), bar);
    EXPECT_THAT(line, AllOf(HasSubstr("25 %"), HasSubstr("data 3 %"), HasSubstr("lr 0.1")));
  }
  EXPECT_EQ(bar_of(live(full_view(), 200)), 30u);
  EXPECT_THAT(live(full_view(), without_bar + 7), Not(HasSubstr("25 %")));
}

TEST(ProgressLine, IsUsableAtCommonWidths) {
  EXPECT_EQ(live(full_view(), 80), "epoch 3/20  120/469  ━━╸────────  loss 0.4321  lr 0.1  12.3k samples/s  eta 0:41");
  EXPECT_EQ(live(full_view(), 40), "epoch 3/20  120/469  loss 0.4321");
  EXPECT_EQ(live(full_view(), 20), "epoch 3/20  120/469");
}

TEST(ProgressLine, FillsTheBarInProportion) {
  auto bar_at = [](int64_t done, bool has_unicode) {
    ProgressView view;
    view.done = done;
    view.total = 100;
    const auto line = live(view, 26, has_unicode);  // "100/100  BAR  100 %"
    const auto begin = line.find("  ") + 2;
    return line.substr(begin, line.find("  ", begin) - begin);
  };
  EXPECT_EQ(bar_at(100, false), "[########]");
  EXPECT_EQ(bar_at(100, true), "━━━━━━━━━━");
  EXPECT_EQ(bar_at(130, true), "━━━━━━━━━━") << "more steps than announced";
  ProgressView empty;
  empty.total = 100;
  EXPECT_EQ(live(empty, 26), "  0/100  ──────────    0 %");
  ProgressView half = empty;
  half.done = 50;
  EXPECT_EQ(live(half, 26), " 50/100  ━━━━━─────   50 %");
  EXPECT_EQ(live(half, 26, false), " 50/100  [####----]   50 %");
}

TEST(ProgressLine, UsesAsciiWithoutUnicode) {
  for (size_t columns : {20, 40, 80, 120, 200}) {
    const auto line = live(full_view(), columns, false);
    EXPECT_TRUE(std::all_of(line.begin(), line.end(), [](unsigned char c) { return c >= ' ' && c < 0x7F; })) << line;
  }
}

TEST(ProgressLine, ColoursLittleAndEndsEachColour) {
  const auto line = render_live(full_view(), {120, true, true});
  EXPECT_THAT(line, StartsWith("\033[1mepoch 3/20\033[0m"));
  EXPECT_THAT(line, AllOf(HasSubstr("\033[36m━"), Not(HasSubstr("\033[33m")))) << "3 % is not much waiting";
  auto waiting = full_view();
  waiting.waiting = 0.34;
  EXPECT_THAT(render_live(waiting, {120, true, true}), HasSubstr("\033[33mdata 34 %\033[0m"));
  EXPECT_THAT(render_live(waiting, {120, false, true}), Not(HasSubstr("\033")));
  std::string plain;
  for (size_t at = 0; at < line.size(); ++at) {
    if (line[at] == '\033')
      at = line.find('m', at);
    else
      plain += line[at];
  }
  EXPECT_EQ(plain, live(full_view(), 120));
}

TEST(ProgressLine, KeepsControlCharactersOutOfTheTerminal) {
  auto view = full_view();
  view.title = "epoch\n\033[2J3";
  view.values[0].name = "lo\rss";
  for (const auto& line : {live(view, 120), render_plain(view)})
    EXPECT_TRUE(std::none_of(line.begin(), line.end(), [](unsigned char c) { return c < ' '; })) << line;
}

TEST(ProgressLine, ShowsTheTimeThatAnUnknownNumberOfStepsHasTaken) {
  auto view = full_view();
  view.total = 0;
  view.left.reset();
  EXPECT_EQ(live(view, 120), "epoch 3/20  120  loss 0.4321  lr 0.1  12.3k samples/s  data 3 %  0:14");
  EXPECT_EQ(render_plain(view), "epoch 3/20  step 120  loss 0.4321  lr 0.1  12300 samples/s  data 3 %  0:14");
}

TEST(ProgressLine, ShowsStepsPerSecondWhereSamplesAreNotCounted) {
  auto view = full_view();
  view.samples_per_second.reset();
  EXPECT_THAT(live(view, 120), HasSubstr("  8.50 steps/s  "));
  view.steps_per_second = 0.01;
  EXPECT_THAT(live(view, 120), HasSubstr("  100 s/step  "));
}

TEST(ProgressLine, IsPlainInAFile) {
  EXPECT_EQ(render_plain(full_view()),
            "epoch 3/20  step 120/469  loss 0.4321  lr 0.1  12300 samples/s  data 3 %  eta 0:41");
  auto ended = full_view();
  ended.has_ended = true;
  EXPECT_THAT(render_plain(ended), EndsWith("12300 samples/s  data 3 %  in 0:14"));
  EXPECT_EQ(live(ended, 120), "epoch 3/20  120/469  loss 0.4321  lr 0.1  12.3k samples/s  data 3 %  in 0:14");
}

TEST(ProgressLine, FormatsNumbersForReading) {
  EXPECT_EQ(format_value(0.43214, false), "0.4321");
  EXPECT_EQ(format_value(0.43, false), "0.43");
  EXPECT_EQ(format_value(0.43, true), "0.4300");
  EXPECT_EQ(format_value(0.1, false), "0.1");
  EXPECT_EQ(format_value(1e-5, false), "1e-05");
  EXPECT_EQ(format_value(-12.346, false), "-12.35");
  EXPECT_EQ(format_value(123456.7, false), "123457");
  EXPECT_EQ(format_value(1000, true), "1000");
  EXPECT_EQ(format_value(0, false), "0");
  EXPECT_EQ(format_value(NAN, false), "nan");
  EXPECT_EQ(format_value(-INFINITY, true), "-inf");
  EXPECT_EQ(format_short(12345), "12.3k");
  EXPECT_EQ(format_short(999.4), "999");
  EXPECT_EQ(format_short(999.6), "1.00k");
  EXPECT_EQ(format_short(2.5e6), "2.50M");
  EXPECT_EQ(format_short(0.0123), "0.0123");
  EXPECT_EQ(format_duration(40600ms), "0:41");
  EXPECT_EQ(format_duration(3723s), "1:02:03");
  EXPECT_EQ(format_duration(51h + 4min + 5s), "2d 03:04");
}

TEST(ProgressLine, CountsColumnsAsTheSystemDoes) {
  const char* before = std::setlocale(LC_CTYPE, nullptr);
  const std::string restored = before;
  ASSERT_NE(std::setlocale(LC_CTYPE, "C.UTF-8"), nullptr);
  for (const std::string text :
       {"epoch", "━╸─", "größe", "漢字", "한글", "ｆｕｌｌ", "e\u0301", "\u200b", "😀", "…±µ"}) {
    std::vector<wchar_t> wide(text.size() + 1);
    const size_t length = std::mbstowcs(wide.data(), text.c_str(), wide.size());
    EXPECT_EQ(display_width(text), static_cast<size_t>(::wcswidth(wide.data(), length))) << text;
  }
  std::setlocale(LC_CTYPE, restored.c_str());
  EXPECT_EQ(display_width("\033[1mab\033[0m"), 2u);
  EXPECT_EQ(display_width("\xFF\xC3"), 2u) << "bytes that are not UTF-8";
}

// --- rates

/// A bar whose steps take as long as the test says.
class Bar {
 public:
  explicit Bar(int64_t total, int64_t done = 0) { state_.begin("bar", total, done, now_); }

  void step(double seconds) {
    now_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
    state_.advance(1, now_);
  }
  void steps(int64_t count, double seconds) {
    while (count-- > 0) step(seconds);
  }
  ProgressState& state() { return state_; }
  double rate() { return state_.view().steps_per_second.value_or(0); }
  double left() { return std::chrono::duration<double>(state_.view().left.value_or(-1s)).count(); }
  ProgressView ended() { return state_.final_view(now_); }

 private:
  ProgressState::Time now_{std::chrono::hours(1)};
  ProgressState state_;
};

TEST(ProgressRate, IsRightForStepsOfAnyLength) {
  for (double seconds : {1e-4, 1e-2, 1.0, 100.0}) {
    Bar bar(10000);
    bar.steps(5000, seconds);
    EXPECT_NEAR(bar.rate(), 1 / seconds, 0.01 / seconds);
    EXPECT_NEAR(bar.left(), 5000 * seconds, 50 * seconds + 0.2);
  }
}

TEST(ProgressRate, DoesNotCountStepsBeforeAResume) {
  Bar bar(1000, 900);
  bar.steps(20, 0.5);
  EXPECT_NEAR(bar.rate(), 2, 0.02);
  EXPECT_NEAR(bar.left(), 40, 0.4);
  EXPECT_NEAR(*bar.ended().steps_per_second, 2, 0.02) << "the average";
}

TEST(ProgressRate, IsThatOfRecentTime) {
  Bar bar(100000);
  bar.steps(600, 1.0);
  bar.steps(1200, 0.1);  // two minutes
  EXPECT_NEAR(bar.rate(), 10, 0.1);
  EXPECT_NEAR(*bar.ended().steps_per_second, 1800 / 720.0, 0.01);
  bar.steps(60, 1.0);
  EXPECT_NEAR(bar.rate(), 1, 0.5);
  bar.steps(60, 1.0);
  EXPECT_NEAR(bar.rate(), 1, 0.05);
}

TEST(ProgressRate, DoesNotJumpIfStepsVary) {
  for (double seconds : {0.001, 0.1, 100.0}) {
    std::mt19937 random(1);
    std::uniform_real_distribution<double> factor(0.5, 1.5);
    Bar bar(1 << 20);
    for (int step = 0; step < 200; ++step) bar.step(seconds * factor(random));
    double before = bar.left();
    for (int step = 0; step < 1000; ++step) {
      bar.step(seconds * factor(random));
      EXPECT_NEAR(bar.left(), before, 0.04 * before);
      before = bar.left();
      EXPECT_NEAR(bar.left(), seconds * ((1 << 20) - 201 - step), 0.2 * before);
    }
  }
}

TEST(ProgressRate, ForgetsASlowFirstStep) {
  Bar bar(1000);
  bar.step(30);
  EXPECT_NEAR(bar.rate(), 1 / 30.0, 1e-3) << "all that is known";
  bar.steps(2, 0.2);
  EXPECT_NEAR(bar.rate(), 5, 0.01);
}

TEST(ProgressRate, OutlastsAPauseButNotSlowerSteps) {
  Bar bar(100000);
  bar.steps(1000, 0.1);
  const double before = bar.left();
  bar.step(3600);  // stopped by Ctrl-Z, and continued
  EXPECT_LT(bar.left(), 2.5 * before);
  bar.steps(600, 0.1);
  EXPECT_NEAR(bar.rate(), 10, 1);
  bar.steps(20, 60.0);
  EXPECT_NEAR(bar.rate(), 1 / 60.0, 0.2 / 60);
}

TEST(ProgressRate, OfSamplesHoldsIfManyStepsAreAddedAtOnce) {
  Bar bar(100000);
  for (int step = 1; step <= 1000; ++step) {
    if (step % 50 == 0) bar.state().add_samples(50 * 32);
    bar.step(100);
    if (step >= 50) {
      EXPECT_NEAR(*bar.state().view().samples_per_second, 0.32, 0.01);
    }
  }
  EXPECT_NEAR(*bar.ended().samples_per_second, 0.32, 0.01);
}

TEST(ProgressRate, HasTheFractionOfTheTimeThatWasWaitedForData) {
  Bar bar(1000);
  for (int step = 0; step < 100; ++step) {
    bar.state().add_waiting(25ms);
    bar.step(0.1);
  }
  EXPECT_NEAR(*bar.state().view().waiting, 0.25, 0.01);
  EXPECT_FALSE(Bar(1000).state().view().waiting) << "no waiting was measured";
}

TEST(ProgressRate, IsMeasuredAtMostTenTimesASecond) {
  ProgressState state;
  ProgressState::Time now{1h};
  state.begin("bar", 0, 0, now);
  int measured = 0;
  for (int step = 0; step < 100000; ++step) measured += state.advance(1, now += 100us);
  EXPECT_LE(measured, 101);
  EXPECT_GE(measured, 99);
}

TEST(ProgressState, KeepsValuesInTheOrderOfTheirFirstUse) {
  ProgressState state;
  state.begin("one", 0, 0, {});
  state.set("loss", 0.43);
  state.set("accuracy", 0.8812);
  state.set("loss", 0.4321);
  state.begin("two", 0, 0, {});
  auto values = state.view().values;
  ASSERT_EQ(values.size(), 2u);
  EXPECT_EQ(values[0].name + " " + values[0].text, "loss 0.4321");
  EXPECT_EQ(values[1].name + " " + values[1].text, "accuracy 0.8812");
  state.set("loss", 0.43);
  EXPECT_EQ(state.view().values[0].text, "0.4300") << "the line does not become shorter for a moment";
}

// --- misuse

TEST(Progress, RefusesMisuseOnEveryRank) {
  run_threads(2, [](const ProcessGroup& world) {
    Progress progress(world, {.output = ProgressOptions::Output::kLines});
    EXPECT_THROW(progress.advance(), UsageError) << "no bar";
    EXPECT_THROW(progress.begin("bar", -1), UsageError);
    EXPECT_THROW(Progress(world, {.line_interval = -1ms}), UsageError);
    progress.end();  // nothing to end
  });
}

}  // namespace
}  // namespace lockstep
