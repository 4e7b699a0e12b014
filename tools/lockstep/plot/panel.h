#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "plot/axis.h"
#include "plot/curves_svg.h"

namespace lockstep::plot {

/// The style of the lines of a run.
struct RunStyle {
  std::string colour;
  std::string dashes;  // an attribute with a blank behind it; empty: solid
};

/// The style of the run with this index: after six colours, the same colours with other dashes.
RunStyle style_of_run(size_t index);

inline constexpr double kMetricSize = 15, kLabelSize = 13;  // of fonts

/// Attributes of lines, without their colour.
inline constexpr const char* kRawLine = "stroke-width=\"1\" stroke-opacity=\"0.4\"";
inline constexpr const char* kStepLine = "stroke-width=\"1.4\"";
inline constexpr const char* kEpochLine = "stroke-width=\"2.2\"";

std::string marker(svg::Point at, const std::string& colour);

/// The kinds of lines that a picture has, which its key explains.
struct LineKinds {
  bool raw = false, steps = false, epochs = false;
};

/// One metric of all runs. Refers to the runs.
class Panel {
 public:
  struct Area {
    double left, top, width, height;  // of the plot, without its labels
  };
  struct Names {
    std::string title, x;  // of the panel and of the horizontal axis
  };

  Panel(std::string metric, const std::vector<Run>& runs, const CurvesStyle& style);

  LineKinds kinds() const { return kinds_; }
  /// The vertical axis of a plot from `top` to `top` + `height`.
  Axis vertical_axis(double top, double height) const;
  /// The number of values that are not drawn: "3 values not finite". Empty if all values are drawn.
  std::string note() const;
  /// An element for the whole panel with its labels. The note is below the name of the horizontal axis.
  std::string draw(const Area& area, const Axis& x, const Names& names) const;

 private:
  struct Curves {
    size_t run;
    const MetricCurves* values;
    bool has_average;  // of steps
  };

  void count(const Series& series);
  Series drawable(Series series) const;
  std::string draw_names(const Area& area, const Names& names) const;
  std::string draw_curves(const Axis& x, const Axis& y, double columns) const;
  std::string draw_no_data(const Area& area) const;

  // All constant after construction.
  std::string metric_;
  const std::vector<Run>& runs_;
  const CurvesStyle& style_;
  std::vector<Curves> curves_;
  LineKinds kinds_;
  Axis::Range range_{0, 0};  // of the values that are drawn
  size_t drawn_ = 0, not_finite_ = 0, not_positive_ = 0;
};

}  // namespace lockstep::plot
