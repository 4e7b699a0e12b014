#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "live/records.h"

namespace lockstep::plot {

using live::XAxis;

/// Values of one metric, in the order of the file. `y` is NaN where the file has null: the value was not finite.
struct Series {
  std::vector<double> x{}, y{};  // equally long

  void add(double at, double value) {
    x.push_back(at);
    y.push_back(value);
  }
  bool empty() const { return x.empty(); }
};

/// A metric of a run: its values in step records and in epoch records.
struct MetricCurves {
  std::string name{};
  Series steps{}, epochs{};
};

/// The records of one run.
struct RunCurves {
  std::vector<MetricCurves> metrics{};  // in order of first appearance
  size_t records = 0;

  /// Null if no record has this metric.
  const MetricCurves* find(const std::string& name) const;
};

/// Reads a metrics.jsonl, one JSON object per line. A last line that is cut off is ignored, because the run may be
/// writing it. Throws SystemError if the file cannot be read or is not a regular file (to open a pipe could block), and
/// Error with file and line if a line is damaged.
RunCurves read_metrics(const std::string& path, XAxis x);

}  // namespace lockstep::plot
