#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace lockstep::bench {

struct PrinterOptions {
  bool json = false;            // print JSON, one object per line, instead of the table
  bool shows_progress = false;  // show a progress line on the terminal
};

/// The value as JSON, or null if there is none.
template <class Number>
nlohmann::ordered_json or_null(const std::optional<Number>& number) {
  return number ? nlohmann::ordered_json(*number) : nlohmann::ordered_json();
}

/// The percentile at `part` (0 to 1), linearly interpolated. 0 if `values` is empty.
double percentile(std::vector<double> values, double part);

double median(const std::vector<double>& values);

/// Statistics of the step times of one side.
struct StepTimes {
  double median_ms = 0;
  double p10_ms = 0;
  double p90_ms = 0;
};

/// Computes the statistics from step times in microseconds.
StepTimes step_times(const std::vector<double>& times_us);

/// Formats with four significant digits, and all digits before the point.
std::string milliseconds(double value);

/// "7", or "7 to 9".
std::string range(size_t fewest, size_t most);

/// "1.25x".
std::string multiple(double value);

}  // namespace lockstep::bench
