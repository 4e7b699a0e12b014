#pragma once

#include <cstddef>
#include <vector>

#include "live/records.h"

namespace lockstep::ui {

using live::RecordTable;
using live::XAxis;

/// The requested part of a curve: a part of the horizontal axis, at most `buckets` points, and the smoothing.
struct CurveRequest {
  XAxis x = XAxis::kStep;
  double from, to;                // of the axis; not finite: the whole curve
  size_t buckets = 1000;          // 1 or more
  double smoothing = 0;           // the weight of earlier values, 0 (not at all) to below 1
  bool is_x_logarithmic = false;  // buckets are equally wide on a logarithmic axis
};

/// The points of a curve. If the part of the axis has more points than buckets, each bucket has the lowest and the
/// highest of its values, so that every spike is visible. NaN is a gap.
struct Curve {
  std::vector<double> x{}, low{}, high{}, smooth{};  // equally long
  size_t points = 0;                                 // of the metric, in the whole run
  double first_x, last_x;                            // of all points; NaN if there are none
  double last, lowest, highest;                      // of all points; NaN if none is finite
};

/// The curve of a metric, by its number, in one table of records. A smoothed value is the mean of all values of the
/// run so far, each with `smoothing` times the weight of the next value; it does not depend on the part that is shown.
/// The nearest points outside of the part are included, so that lines reach the border. Pure.
Curve curve_of(const RecordTable& table, int metric, const CurveRequest& request);

}  // namespace lockstep::ui
