#include "bench/plot.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "bench/collective_report.h"
#include "cli/svg.h"

namespace lockstep::bench {
namespace {

using svg::head;
using svg::joined;
using svg::kColours;
using svg::kFaint;
using svg::kGrid;
using svg::kInk;
using svg::label;
using svg::line;
using svg::Point;

constexpr double kMinMicroseconds = 0.001;

std::string bytes_name(int power) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  const int unit = std::min(power / 10, 4);
  return fmt::format("{} {}", int64_t{1} << (power - 10 * unit), kUnits[unit]);
}

/// Formats a value in microseconds: "200 ns", "1 ms".
std::string time_name(double value) {
  static constexpr const char* kUnits[] = {"ns", "\u00b5s", "ms", "s"};
  double scaled = value * 1000;
  int unit = 0;
  for (; unit < 3 && scaled >= 999.5; ++unit) scaled /= 1000;
  return fmt::format("{:g} {}", std::round(scaled), kUnits[unit]);
}

constexpr double kHeight = 580;
constexpr double kLeft = 92, kRight = 730, kTop = 84, kBottom = 504;  // bounds of the plot area
constexpr double kLegend = kRight + 24;

/// A series with its style.
struct Curve {
  Series series;
  std::string colour;
  bool is_hollow = false;  // hollow markers: ordinary memory
};

std::vector<Curve> curves_of(const std::vector<CollectiveRow>& rows) {
  std::map<std::string, std::string> colours;
  std::vector<Curve> curves;
  for (auto& series : series_of(rows)) {
    std::sort(series.rows.begin(), series.rows.end(),
              [](const CollectiveRow& a, const CollectiveRow& b) { return a.bytes < b.bytes; });
    const auto colour = colours.emplace(series.backend, kColours[colours.size() % std::size(kColours)]).first->second;
    const bool is_hollow = series.memory == "ordinary";
    curves.push_back({std::move(series), colour, is_hollow});
  }
  return curves;
}

class Plot {
 public:
  explicit Plot(const std::vector<CollectiveRow>& rows)
      : curves_(curves_of(rows)), x_(size_axis(rows)), y_(time_axis(rows)) {}

  std::string draw(const PlotText& text) const {
    std::string svg = head(width(), kHeight);
    svg += label({kLeft, 34}, text.title, "font-size=\"20\" font-weight=\"bold\"");
    svg += label({kLeft, 58}, text.subtitle, fmt::format("font-size=\"14\" fill=\"{}\"", kFaint));
    svg += draw_axes();
    for (const auto& curve : curves_) svg += draw_band(curve);
    svg += draw_floor();
    for (const auto& curve : curves_) svg += draw_line(curve);
    return svg + draw_legend() + "</svg>\n";
  }

 private:
  /// Wide enough for the longest name in the legend.
  double width() const {
    constexpr double kMinLetters = 18, kLetter = 8.6;
    double letters = kMinLetters;
    for (const auto& curve : curves_) letters = std::max(letters, static_cast<double>(curve.series.name().size()));
    return std::ceil(kLegend + 42 + letters * kLetter + 12);
  }

  static LogAxis size_axis(const std::vector<CollectiveRow>& rows) {
    const auto [least, most] = std::minmax_element(
        rows.begin(), rows.end(), [](const CollectiveRow& a, const CollectiveRow& b) { return a.bytes < b.bytes; });
    return LogAxis::of_bytes(static_cast<double>(least->bytes), static_cast<double>(most->bytes), {kLeft, kRight});
  }

  static LogAxis time_axis(const std::vector<CollectiveRow>& rows) {
    double least = rows[0].p10_us, most = rows[0].p90_us;
    for (const auto& row : rows) {
      least = std::min({least, row.p10_us, row.floor_us.value_or(row.p10_us)});
      most = std::max({most, row.p90_us, row.floor_us.value_or(row.p90_us)});
    }
    return LogAxis::of_microseconds(least, most, {kBottom, kTop});
  }

  Point at(const CollectiveRow& row, double time_us) const {
    return {x_.at(static_cast<double>(row.bytes)), y_.at(time_us)};
  }

  std::string draw_axes() const {
    const std::string grid = fmt::format("stroke=\"{}\"", kGrid);
    std::string svg;
    for (const auto& [value, name] : x_.ticks()) {
      svg += line({x_.at(value), kTop}, {x_.at(value), kBottom}, grid);
      svg += label({x_.at(value), kBottom + 24}, name, "text-anchor=\"middle\"");
    }
    for (const auto& [value, name] : y_.ticks()) {
      svg += line({kLeft, y_.at(value)}, {kRight, y_.at(value)}, grid);
      svg += label({kLeft - 10, y_.at(value) + 5}, name, "text-anchor=\"end\"");
    }
    const std::string axis = fmt::format("stroke=\"{}\" stroke-width=\"1.2\"", kInk);
    svg += line({kLeft, kBottom}, {kRight, kBottom}, axis) + line({kLeft, kTop}, {kLeft, kBottom}, axis);
    svg += label({(kLeft + kRight) / 2, kBottom + 56}, "message size (bytes)", "text-anchor=\"middle\"");
    const double middle = (kTop + kBottom) / 2;
    return svg + label({22, middle}, "time of a call (seconds)",
                       fmt::format("text-anchor=\"middle\" transform=\"rotate(-90 22 {})\"", middle));
  }

  std::string draw_band(const Curve& curve) const {
    std::vector<Point> outline;
    for (const auto& row : curve.series.rows) outline.push_back(at(row, row.p90_us));
    for (auto row = curve.series.rows.rbegin(); row != curve.series.rows.rend(); ++row)
      outline.push_back(at(*row, row->p10_us));
    return fmt::format("<polygon points=\"{}\" fill=\"{}\" fill-opacity=\"0.14\"/>\n", joined(outline), curve.colour);
  }

  std::string draw_line(const Curve& curve) const {
    std::vector<Point> points;
    for (const auto& row : curve.series.rows) points.push_back(at(row, row.time_us));
    std::string svg = fmt::format("<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\"/>\n",
                                  joined(points), curve.colour);
    for (const auto& point : points) svg += draw_marker(point, curve);
    return svg;
  }

  static std::string draw_marker(Point point, const Curve& curve) {
    return fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3.6\" fill=\"{}\" stroke=\"{}\" stroke-width=\"1.6\"/>\n", point.x,
        point.y, curve.is_hollow ? "white" : curve.colour, curve.colour);
  }

  std::string draw_floor() const {
    std::vector<Point> points;
    for (const auto& row : curves_[0].series.rows)
      if (row.floor_us && *row.floor_us > 0) points.push_back(at(row, *row.floor_us));
    if (points.empty()) return "";
    return fmt::format("<polyline points=\"{}\" fill=\"none\" {}/>\n", joined(points), floor_style());
  }

  static std::string floor_style() {
    return fmt::format("stroke=\"{}\" stroke-width=\"2\" stroke-dasharray=\"7 5\"", kFaint);
  }

  /// The legend beside the plot area, ordered like the right ends of the lines: slowest first.
  std::string draw_legend() const {
    auto curves = curves_;
    std::stable_sort(curves.begin(), curves.end(), [](const Curve& a, const Curve& b) {
      return a.series.rows.back().time_us > b.series.rows.back().time_us;
    });
    std::string svg;
    double y = kTop + 12;
    for (const auto& curve : curves) {
      svg += line({kLegend, y}, {kLegend + 32, y}, fmt::format("stroke=\"{}\" stroke-width=\"2\"", curve.colour));
      svg += draw_marker({kLegend + 16, y}, curve) + label({kLegend + 42, y + 5}, curve.series.name(), "");
      y += 26;
    }
    const std::string small = fmt::format("font-size=\"13\" fill=\"{}\"", kFaint);
    if (curves_[0].series.rows[0].floor_us) {
      svg += line({kLegend, y}, {kLegend + 32, y}, floor_style()) + label({kLegend + 42, y + 5}, "floor", "");
      y += 26;
    }
    return svg + label({kLegend, y + 14}, "lines: median", small) +
           label({kLegend, y + 32}, "bands: 10th to 90th", small) + label({kLegend, y + 50}, "percentile", small);
  }

  const std::vector<Curve> curves_;
  const LogAxis x_;
  const LogAxis y_;
};

}  // namespace

LogAxis::LogAxis(double least, double largest, Places places)
    : least_(std::log(least)), largest_(std::log(largest)), places_(places) {}

LogAxis LogAxis::of_bytes(double least, double largest, Places places) {
  if (least == largest) {  // a single size is placed in the middle
    least /= 2;
    largest *= 2;
  }
  LogAxis axis(least, largest, places);
  const int first = static_cast<int>(std::ceil(std::log2(std::max(least, 1.0)) - 1e-9));
  const int last = static_cast<int>(std::floor(std::log2(largest) + 1e-9));
  constexpr int kMaxTicks = 8;
  const int step = (last - first) / kMaxTicks + 1;
  for (int power = first; power <= last; power += step) axis.ticks_.push_back({std::pow(2, power), bytes_name(power)});
  return axis;
}

LogAxis LogAxis::of_microseconds(double least, double largest, Places places) {
  const double from = svg::rounded_down(std::max(least, kMinMicroseconds));
  const double to = std::max(svg::rounded_up(std::max(largest, kMinMicroseconds)), 2 * from);
  LogAxis axis(from, to, places);
  const bool is_short = to / from < 500;  // powers of ten alone would give at most two ticks
  for (double ten = std::pow(10, std::floor(std::log10(from) + 1e-9)); ten <= to * (1 + 1e-9); ten *= 10)
    for (double step : {1.0, 2.0, 5.0})
      if ((step == 1 || is_short) && step * ten >= from * (1 - 1e-9) && step * ten <= to * (1 + 1e-9))
        axis.ticks_.push_back({step * ten, time_name(step * ten)});
  return axis;
}

double LogAxis::at(double value) const {
  const double part = (std::log(std::max(value, kMinMicroseconds)) - least_) / (largest_ - least_);
  return std::lerp(places_.least, places_.largest, part);
}

std::string plot_svg(const std::vector<CollectiveRow>& rows, const PlotText& text) {
  return Plot(rows).draw(text);
}

}  // namespace lockstep::bench
