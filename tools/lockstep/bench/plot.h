#pragma once

#include <string>
#include <vector>

#include "bench/collective_report.h"

namespace lockstep::bench {

struct Tick {
  double value = 0;
  std::string name{};
  bool operator==(const Tick&) const = default;
};

/// A logarithmic scale from values to places on paper. A plain value.
class LogAxis {
 public:
  /// Where the least and the largest value are.
  struct Places {
    double least, largest;
  };

  /// From the least to the largest, with ticks at powers of two: "64 B", "4 KiB".
  static LogAxis of_bytes(double least, double largest, Places places);
  /// The same, rounded outward to 1, 2 or 5 times a power of ten, with ticks at powers of ten: "10 us" with its Greek
  /// letter, "1 ms". Values of 0 or less, which have no place, count as a nanosecond.
  static LogAxis of_microseconds(double least, double largest, Places places);

  double at(double value) const;
  const std::vector<Tick>& ticks() const { return ticks_; }

 private:
  LogAxis(double least, double largest, Places places);

  double least_, largest_;  // logarithms
  Places places_;
  std::vector<Tick> ticks_;
};

struct PlotText {
  std::string title{};
  std::string subtitle{};
};

/// Time over size, both logarithmic, as an SVG document: a line for each backend and memory with a band from the 10th
/// to the 90th percentile, the floor as a dashed line. Pure. There is at least one row, and every row has a size.
std::string plot_svg(const std::vector<CollectiveRow>& rows, const PlotText& text);

}  // namespace lockstep::bench
