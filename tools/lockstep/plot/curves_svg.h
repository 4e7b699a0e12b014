#pragma once

#include <string>
#include <vector>

#include "plot/metrics_file.h"

namespace lockstep::plot {

struct Run {
  std::string name{};
  RunCurves curves{};
};

struct CurvesStyle {
  std::vector<std::string> metrics{};  // one panel each, in this order
  XAxis x = XAxis::kStep;
  double smoothing = 0.6;  // weight of the average over step records; 0: none
  bool is_logarithmic = false;
  std::string title{};  // empty: the name of a single run, else "Training curves"
};

/// Returns an SVG picture with a panel for each metric. Each run has one colour in all panels, and a dash pattern after
/// the sixth run. Steps are thin lines, epochs are lines with markers. If step values are noisy, their average is
/// drawn, and the values faintly behind it. The size of the picture depends on its panels, not on the number of
/// records. Pure; equal arguments give equal bytes. `runs` and `metrics` must not be empty.
std::string curves_svg(const std::vector<Run>& runs, const CurvesStyle& style);

}  // namespace lockstep::plot
