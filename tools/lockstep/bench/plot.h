#pragma once

#include <string>
#include <vector>

#include "bench/row.h"

namespace lockstep::bench {

struct PlotText {
  std::string title{};
  std::string subtitle{};
};

/// Time over size, both logarithmic, as an SVG document: a line for each backend and memory with a band from the 10th
/// to the 90th percentile, the floor as a dashed line. Pure. There is at least one row, and every row has a size.
std::string plot_svg(const std::vector<Row>& rows, const PlotText& text);

}  // namespace lockstep::bench
