#pragma once

#include <string>
#include <vector>

#include "cli/svg.h"

namespace lockstep::plot {

/// Maps values to coordinates, with ticks at round numbers.
class Axis {
 public:
  /// The least and the largest value; both are finite.
  struct Range {
    double least, largest;
  };
  /// The coordinates of the least and the largest value.
  struct Places {
    double least, largest;
  };

  /// A vertical axis. Its bounds are the ticks around the range.
  static Axis vertical(Range range, Places places, int most_ticks);
  /// The same, logarithmic. The range is above 0.
  static Axis logarithmic(Range range, Places places, int most_ticks);
  /// A horizontal axis of steps or epochs. It begins at 0 if the range begins near 0, and ends shortly behind the
  /// range. Ticks are at least `least_step` apart.
  static Axis horizontal(Range range, Places places, int most_ticks, double least_step);
  /// A horizontal axis of seconds, with ticks such as "5 min" and "2 h".
  static Axis duration(Range range, Places places, int most_ticks);

  /// An axis from 0 to 1 for a plot without values.
  static Axis without_ticks(Places places) { return Axis({0, 1}, places, false); }

  /// The coordinate of a value. Values outside of the bounds are placed at the nearest bound.
  double at(double value) const;
  const std::vector<svg::Tick>& ticks() const { return ticks_; }

 private:
  Axis(Range bounds, Places places, bool is_logarithmic);
  void add_ticks(double step, double unit, const std::string& suffix);

  Range bounds_;  // constant after construction, as all members
  Places places_;
  bool is_logarithmic_;
  std::vector<svg::Tick> ticks_;
};

/// A number in the labels of an axis with ticks `step` apart, up to `largest` in magnitude: "0.25", "20k", "5e-6".
std::string tick_name(double value, double step, double largest);

}  // namespace lockstep::plot
