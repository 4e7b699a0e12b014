#pragma once

#include <vector>

namespace lockstep::bench {

/// The value below which `part` (0 to 1) of the values lie, interpolated between its neighbours. Of no values: 0.
double percentile(std::vector<double> values, double part);

double median(const std::vector<double>& values);

}  // namespace lockstep::bench
