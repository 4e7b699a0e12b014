#include "plot/panel.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "cli/svg.h"
#include "plot/curve.h"

namespace lockstep::plot {
namespace {

/// A group of lines with equal attributes. The name is shown when the mouse points at them.
std::string group(const char* kind, const std::string& name, const RunStyle& style, const char* attributes,
                  const std::string& lines) {
  if (lines.empty()) return "";
  return fmt::format(
      "<g class=\"{}\" fill=\"none\" stroke=\"{}\" stroke-linejoin=\"round\" {}>\n<title>{}</title>\n{}</g>\n", kind,
      style.colour, attributes, svg::escaped(name), lines);
}

std::string polyline(const Line& line, const RunStyle& style) {
  return fmt::format("<polyline {}points=\"{}\"/>\n", style.dashes, svg::joined(line));
}

/// The lines as polylines. A single point becomes a dot.
std::string draw_lines(const std::vector<Line>& lines, const RunStyle& style) {
  std::string drawn;
  for (const auto& line : lines)
    drawn += line.size() > 1 ? polyline(line, style)
                             : fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"2.6\" fill=\"{}\"/>\n", line[0].x,
                                           line[0].y, style.colour);
  return drawn;
}

/// The same with markers at the points, as far as there is room for them.
std::string draw_marked_lines(const std::vector<Line>& lines, const RunStyle& style) {
  constexpr double kMarkerDistance = 9;
  std::string drawn, markers;
  for (const auto& line : lines) {
    if (line.size() > 1) drawn += polyline(line, style);
    for (const auto& point : marked_points(line, kMarkerDistance)) markers += marker(point, style.colour);
  }
  return drawn + markers;
}

std::string draw_axes(const Panel::Area& area, const Axis& x, const Axis& y) {
  const double right = area.left + area.width, bottom = area.top + area.height;
  const auto grid = fmt::format("stroke=\"{}\"", svg::kGrid);
  const auto labels = fmt::format("font-size=\"{}\"", kLabelSize);
  std::string drawn;
  for (const auto& [value, name] : x.ticks()) {
    drawn += svg::line({x.at(value), area.top}, {x.at(value), bottom}, grid);
    drawn += svg::label({x.at(value), bottom + 18}, name, "class=\"x\" text-anchor=\"middle\" " + labels);
  }
  for (const auto& [value, name] : y.ticks()) {
    drawn += svg::line({area.left, y.at(value)}, {right, y.at(value)}, grid);
    drawn += svg::label({area.left - 8, y.at(value) + 4.5}, name, "class=\"y\" text-anchor=\"end\" " + labels);
  }
  const auto axis = fmt::format("stroke=\"{}\" stroke-width=\"1.2\"", svg::kInk);
  return drawn + svg::line({area.left, bottom}, {right, bottom}, axis) +
         svg::line({area.left, area.top}, {area.left, bottom}, axis);
}

std::string values_that_are(size_t count, const char* what) {
  return fmt::format("{} value{} {}", count, count == 1 ? "" : "s", what);
}

}  // namespace

RunStyle style_of_run(size_t index) {
  static constexpr const char* kDashes[] = {"", "stroke-dasharray=\"7 4\" ", "stroke-dasharray=\"2 3\" ",
                                            "stroke-dasharray=\"9 3 2 3\" "};
  constexpr size_t kCount = std::size(svg::kColours);
  return {svg::kColours[index % kCount], kDashes[index / kCount % std::size(kDashes)]};
}

std::string marker(svg::Point at, const std::string& colour) {
  return fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.6\" fill=\"{}\" stroke=\"{}\" stroke-width=\"1\"/>\n",
                     at.x, at.y, colour, svg::kPaper);
}

Panel::Panel(std::string metric, const std::vector<Run>& runs, const CurvesStyle& style)
    : metric_(std::move(metric)), runs_(runs), style_(style) {
  for (size_t run = 0; run < runs.size(); ++run) {
    const auto* values = runs[run].curves.find(metric_);
    if (!values) continue;
    const bool has_average = style.smoothing > 0 && !is_schedule(metric_) && is_noisy(values->steps.y);
    curves_.push_back({run, values, has_average});
    kinds_.raw |= has_average;
    kinds_.steps |= !values->steps.empty();
    kinds_.epochs |= !values->epochs.empty();
    count(values->steps);
    count(values->epochs);
  }
}

void Panel::count(const Series& series) {
  for (const double value : series.y) {
    if (!std::isfinite(value)) {
      ++not_finite_;
    } else if (style_.is_logarithmic && value <= 0) {
      ++not_positive_;
    } else {
      range_ = drawn_ == 0 ? Axis::Range{value, value}
                           : Axis::Range{std::min(range_.least, value), std::max(range_.largest, value)};
      ++drawn_;
    }
  }
}

Axis Panel::vertical_axis(double top, double height) const {
  constexpr double kTickDistance = 40;
  const Axis::Places places{top + height, top};
  const int most_ticks = std::max(2, static_cast<int>(height / kTickDistance));
  if (drawn_ == 0) return Axis::without_ticks(places);
  return style_.is_logarithmic ? Axis::logarithmic(range_, places, most_ticks)
                               : Axis::vertical(range_, places, most_ticks);
}

std::string Panel::draw(const Area& area, const Axis& x, const Names& names) const {
  const auto y = vertical_axis(area.top, area.height);
  return "<g class=\"panel\">\n" + draw_names(area, names) + draw_axes(area, x, y) +
         (drawn_ > 0 ? draw_curves(x, y, area.width) : draw_no_data(area)) + "</g>\n";
}

std::string Panel::note() const {
  std::string text;
  if (not_finite_ > 0) text = values_that_are(not_finite_, "not finite");
  if (not_positive_ > 0) text += (text.empty() ? "" : ", ") + values_that_are(not_positive_, "not above 0");
  return text;
}

std::string Panel::draw_names(const Area& area, const Names& names) const {
  const double middle = area.left + area.width / 2, bottom = area.top + area.height;
  const auto faint = fmt::format("text-anchor=\"middle\" font-size=\"{}\" fill=\"{}\"", kLabelSize, svg::kFaint);
  auto drawn = svg::label({area.left, area.top - 12}, names.title,
                          fmt::format("class=\"metric\" font-size=\"{}\" font-weight=\"bold\"", kMetricSize));
  if (names.title != metric_) drawn = fmt::format("<g><title>{}</title>\n{}</g>\n", svg::escaped(metric_), drawn);
  drawn += svg::label({middle, bottom + 38}, names.x, faint);
  return note().empty() ? drawn : drawn + svg::label({middle, bottom + 56}, note(), "class=\"note\" " + faint);
}

std::string Panel::draw_no_data(const Area& area) const {
  return svg::label({area.left + area.width / 2, area.top + area.height / 2 + 5},
                    not_positive_ > 0 ? "no values above 0" : "no finite values",
                    fmt::format("class=\"empty\" text-anchor=\"middle\" fill=\"{}\"", svg::kFaint));
}

/// The series, with NaN for values that the axis does not have.
Series Panel::drawable(Series series) const {
  if (style_.is_logarithmic)
    std::replace_if(
        series.y.begin(), series.y.end(), [](double value) { return value <= 0; },
        std::numeric_limits<double>::quiet_NaN());
  return series;
}

std::string Panel::draw_curves(const Axis& x, const Axis& y, double columns) const {
  const auto at = [&](double x_value, double y_value) { return svg::Point{x.at(x_value), y.at(y_value)}; };
  const auto lines_of = [&](const Series& series) { return visible_lines(series.x, series.y, at); };
  std::string raw, steps, epochs;  // in this order: averages are above the values of all runs
  for (const auto& [run, values, has_average] : curves_) {
    const auto style = style_of_run(run);
    const auto& name = runs_[run].name;
    const auto measured = drawable(values->steps);
    if (has_average) {
      raw += group("raw", name, style, kRawLine, draw_lines(lines_of(measured), {style.colour, ""}));
      auto average = means(measured, static_cast<size_t>(columns));
      average.y = smoothed(average.y, style_.smoothing);
      steps += group("steps", name, style, kStepLine, draw_lines(lines_of(average), style));
    } else {
      steps += group("steps", name, style, kStepLine, draw_lines(lines_of(measured), style));
    }
    epochs += group("epochs", name, style, kEpochLine, draw_marked_lines(lines_of(drawable(values->epochs)), style));
  }
  return raw + steps + epochs;
}

}  // namespace lockstep::plot
