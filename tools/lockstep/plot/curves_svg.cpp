#include "plot/curves_svg.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "cli/svg.h"
#include "plot/axis.h"
#include "plot/panel.h"
#include "plot/run_names.h"

namespace lockstep::plot {
namespace {

constexpr double kMargin = 24;
constexpr double kTitleBaseline = 36, kTitleSize = 20, kLegendTop = 52, kLegendRow = 22;
constexpr double kAbove = 44, kBelow = 50;  // a panel's title and the labels of its horizontal axis
constexpr double kNote = 18;
constexpr double kBetween = 26;  // panels
constexpr double kSample = 30;   // the length of a line in the legend
constexpr double kLegendSize = 14;
constexpr size_t kMaxLetters = 48;  // of a name in the legend

/// Blue and light blue are hard to tell apart in dark mode: light blue becomes lighter.
constexpr svg::DarkColour kLightBlueInDarkMode{svg::kColours[5], "#a5dcff"};

/// The number of panels side by side, and their size.
struct Grid {
  size_t columns;
  double width, height;  // of a plot
};

Grid grid_for(size_t panels) {
  if (panels == 1) return {1, 760, 400};
  if (panels <= 4) return {2, 430, 260};
  if (panels <= 9) return {3, 320, 210};
  return {4, 270, 180};
}

/// A line of the legend with its text.
struct LegendEntry {
  std::string text, full_text;
  std::string colour, attributes;
  bool has_marker = false;
};

std::string draw_entry(const LegendEntry& entry, svg::Point at) {
  auto drawn =
      svg::line({at.x, at.y}, {at.x + kSample, at.y}, fmt::format("stroke=\"{}\" {}", entry.colour, entry.attributes));
  if (entry.has_marker) drawn += marker({at.x + kSample / 2, at.y}, entry.colour);
  drawn += svg::label({at.x + kSample + 8, at.y + 5}, entry.text, fmt::format("font-size=\"{}\"", kLegendSize));
  return fmt::format("<g class=\"entry\"><title>{}</title>\n{}</g>\n", svg::escaped(entry.full_text), drawn);
}

/// Entries in rows, in columns of equal width.
class Legend {
 public:
  explicit Legend(std::vector<LegendEntry> entries) : entries_(std::move(entries)) {
    for (const auto& entry : entries_)
      cell_ = std::max(cell_, kSample + 8 + svg::text_width(entry.text, kLegendSize) + 24);
  }

  double least_width() const { return cell_; }
  double height(double width) const { return kLegendRow * std::ceil(double(entries_.size()) / per_row(width)); }

  std::string draw(const char* kind, svg::Point at, double width) const {
    std::string drawn;
    const auto columns = static_cast<size_t>(per_row(width));
    for (size_t i = 0; i < entries_.size(); ++i)
      drawn += draw_entry(entries_[i],
                          {at.x + cell_ * double(i % columns), at.y + kLegendRow * (double(i / columns) + 0.5)});
    return drawn.empty() ? "" : fmt::format("<g class=\"{}\">\n{}</g>\n", kind, drawn);
  }

 private:
  double per_row(double width) const { return std::max(1.0, std::floor(width / std::max(cell_, 1.0))); }

  const std::vector<LegendEntry> entries_;
  double cell_ = 0;
};

std::vector<LegendEntry> entries_of_runs(const std::vector<Run>& runs) {
  std::vector<std::string> names;
  for (const auto& run : runs) names.push_back(run.name);
  const auto texts = shortened_distinctly(names, kMaxLetters);
  std::vector<LegendEntry> entries;
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto run_style = style_of_run(i);
    entries.push_back({texts[i], names[i], run_style.colour, run_style.dashes + kEpochLine});
  }
  return entries;
}

/// The key, which names the kinds of lines. Empty if there is only one kind.
std::vector<LegendEntry> entries_of_key(LineKinds kinds, double smoothing) {
  if (kinds.raw + kinds.steps + kinds.epochs < 2) return {};
  std::vector<LegendEntry> entries;
  const auto add = [&](std::string text, const char* attributes, bool has_marker) {
    entries.push_back({text, text, svg::kInk, attributes, has_marker});
  };
  if (kinds.steps) add(kinds.raw ? fmt::format("steps, smoothed ({:g})", smoothing) : "steps", kStepLine, false);
  if (kinds.raw) add("steps, as measured", kRawLine, false);
  if (kinds.epochs) add("epochs", kEpochLine, true);
  return entries;
}

void widen(Axis::Range& range, bool& is_empty, const Series& series) {
  for (const double x : series.x) {
    range = is_empty ? Axis::Range{x, x} : Axis::Range{std::min(range.least, x), std::max(range.largest, x)};
    is_empty = false;
  }
}

/// The range of the horizontal axis, the same in all panels.
Axis::Range horizontal_range(const std::vector<Run>& runs, const std::vector<std::string>& metrics) {
  Axis::Range range{0, 1};
  bool is_empty = true;
  for (const auto& run : runs)
    for (const auto& metric : metrics)
      if (const auto* curves = run.curves.find(metric)) {
        widen(range, is_empty, curves->steps);
        widen(range, is_empty, curves->epochs);
      }
  return range;
}

std::string name_of(XAxis x) {
  return x == XAxis::kStep ? "step" : x == XAxis::kEpoch ? "epoch" : "time of training";
}

std::vector<Panel> panels_of(const std::vector<Run>& runs, const CurvesStyle& style) {
  std::vector<Panel> panels;
  for (const auto& metric : style.metrics) panels.emplace_back(metric, runs, style);
  return panels;
}

LineKinds kinds_in(const std::vector<Panel>& panels) {
  LineKinds all;
  for (const auto& panel : panels) {
    const auto kinds = panel.kinds();
    all = {.raw = all.raw || kinds.raw, .steps = all.steps || kinds.steps, .epochs = all.epochs || kinds.epochs};
  }
  return all;
}

/// The room for the widest label of a vertical axis.
double label_width(const std::vector<Panel>& panels, const Grid& grid) {
  double width = 0;
  for (const auto& panel : panels) {
    const auto axis = panel.vertical_axis(0, grid.height);
    for (const auto& tick : axis.ticks()) width = std::max(width, svg::text_width(tick.name, kLabelSize) + 12);
  }
  return width;
}

/// Whether the name of the only run is the title, so that a legend would repeat it.
bool has_name_as_title(const std::vector<Run>& runs, const CurvesStyle& style) {
  return runs.size() == 1 && style.title.empty();
}

std::string title_of(const std::vector<Run>& runs, const CurvesStyle& style) {
  if (has_name_as_title(runs, style)) return shortened(runs[0].name, kMaxLetters);
  return style.title.empty() ? "Training curves" : style.title;
}

/// The titles of panels: the metrics, as far as there is room for them.
std::vector<std::string> titles_of(const std::vector<std::string>& metrics, const Grid& grid) {
  constexpr double kLetter = 0.58;  // the mean width of bold letters, in parts of the font's size
  return shortened_distinctly(metrics, static_cast<size_t>(grid.width / (kLetter * kMetricSize)));
}

/// The height of a panel with its labels.
double panel_height(const std::vector<Panel>& panels, const Grid& grid) {
  const bool has_notes =
      std::any_of(panels.begin(), panels.end(), [](const Panel& one) { return !one.note().empty(); });
  return kAbove + grid.height + kBelow + (has_notes ? kNote : 0);
}

class Picture {
 public:
  Picture(const std::vector<Run>& runs, const CurvesStyle& style)
      : style_(style),
        title_(title_of(runs, style)),
        grid_(grid_for(style.metrics.size())),
        x_range_(horizontal_range(runs, style.metrics)),
        panels_(panels_of(runs, style)),
        titles_(titles_of(style.metrics, grid_)),
        labels_(label_width(panels_, grid_)),
        panel_height_(panel_height(panels_, grid_)),
        runs_(has_name_as_title(runs, style) ? std::vector<LegendEntry>() : entries_of_runs(runs)),
        key_(entries_of_key(kinds_in(panels_), style.smoothing)) {}

  std::string draw() const {
    const double inner = inner_width();
    const double runs_bottom = kLegendTop + runs_.height(inner), legend_bottom = runs_bottom + key_.height(inner);
    const auto rows = double((panels_.size() + grid_.columns - 1) / grid_.columns);
    const double height = std::ceil(legend_bottom + rows * panel_height_ + 8);
    auto drawn = svg::head(std::ceil(inner + 2 * kMargin), height, {kLightBlueInDarkMode});
    drawn += fmt::format("<title>{}</title>\n", svg::escaped(title_));
    drawn += svg::label({kMargin, kTitleBaseline}, title_,
                        fmt::format("class=\"title\" font-size=\"{}\" font-weight=\"bold\"", kTitleSize));
    drawn += runs_.draw("legend", {kMargin, kLegendTop}, inner) + key_.draw("key", {kMargin, runs_bottom}, inner);
    for (size_t i = 0; i < panels_.size(); ++i) drawn += draw_panel(i, legend_bottom);
    return drawn + "</svg>\n";
  }

 private:
  double inner_width() const {
    const auto columns = double(grid_.columns);
    const double panels = columns * (labels_ + grid_.width) + (columns - 1) * kBetween;
    return std::max({panels, runs_.least_width(), key_.least_width(), svg::text_width(title_, 1.08 * kTitleSize)});
  }

  std::string draw_panel(size_t index, double top) const {
    const auto column = double(index % grid_.columns), row = double(index / grid_.columns);
    const Panel::Area area{.left = kMargin + column * (labels_ + grid_.width + kBetween) + labels_,
                           .top = top + row * panel_height_ + kAbove,
                           .width = grid_.width,
                           .height = grid_.height};
    return panels_[index].draw(area, horizontal_axis({area.left, area.left + area.width}),
                               {titles_[index], name_of(style_.x)});
  }

  Axis horizontal_axis(Axis::Places places) const {
    const int most_ticks = static_cast<int>(grid_.width / 52);
    if (style_.x == XAxis::kTime) return Axis::duration(x_range_, places, most_ticks);
    return Axis::horizontal(x_range_, places, most_ticks, style_.x == XAxis::kStep ? 1 : 0);
  }

  const CurvesStyle& style_;
  const std::string title_;
  const Grid grid_;
  const Axis::Range x_range_;
  const std::vector<Panel> panels_;
  const std::vector<std::string> titles_;  // of the panels
  const double labels_;                    // the width of the labels of a vertical axis
  const double panel_height_;
  const Legend runs_, key_;
};

}  // namespace

std::string curves_svg(const std::vector<Run>& runs, const CurvesStyle& style) {
  return Picture(runs, style).draw();
}

}  // namespace lockstep::plot
