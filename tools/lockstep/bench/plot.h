#pragma once

#include <string>
#include <vector>

#include "bench/collective_report.h"
#include "cli/svg.h"

namespace lockstep::bench {

/// Maps values to coordinates on a logarithmic scale.
class LogAxis {
 public:
  /// The coordinates of the least and the largest value.
  struct Places {
    double least, largest;
  };

  /// An axis from the least to the largest value, with ticks at powers of two: "64 B", "4 KiB".
  static LogAxis of_bytes(double least, double largest, Places places);
  /// The same, with bounds rounded outward to 1, 2 or 5 times a power of ten and ticks at powers of ten: "10 us" (with
  /// the Greek letter), "1 ms". Values of 0 or less count as one nanosecond.
  static LogAxis of_microseconds(double least, double largest, Places places);

  double at(double value) const;
  const std::vector<svg::Tick>& ticks() const { return ticks_; }

 private:
  LogAxis(double least, double largest, Places places);

  double least_, largest_;  // logarithms
  Places places_;
  std::vector<svg::Tick> ticks_;
};

struct PlotText {
  std::string title{};
  std::string subtitle{};
};

/// Returns an SVG plot of time over size, both logarithmic: a line for each series with a band from the 10th to the
/// 90th percentile, and the floor as a dashed line. Pure. `rows` must not be empty, and every row must have a size.
std::string plot_svg(const std::vector<CollectiveRow>& rows, const PlotText& text);

}  // namespace lockstep::bench
