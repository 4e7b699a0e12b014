#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace lockstep::bench {

/// Of one side's steps, in milliseconds.
struct StepTimes {
  double median_ms = 0;
  double p10_ms = 0;
  double p90_ms = 0;
};

/// Of samples in microseconds, each of one step.
StepTimes step_times(const std::vector<double>& times_us);

/// Four digits, and all of those before the point.
std::string milliseconds(double value);

/// "7", or "7 to 9".
std::string range(size_t fewest, size_t most);

/// "1.25x".
std::string multiple(double value);

}  // namespace lockstep::bench
