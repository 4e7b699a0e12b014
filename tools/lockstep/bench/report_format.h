#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace lockstep::bench {

struct PrinterOptions {
  bool json = false;            // one object a line, in place of the table
  bool shows_progress = false;  // one line on a terminal, rewritten
};

/// A JSON value, or null where nothing was measured.
template <class Number>
nlohmann::ordered_json or_null(const std::optional<Number>& number) {
  return number ? nlohmann::ordered_json(*number) : nlohmann::ordered_json();
}

/// The value below which `part` (0 to 1) of the values lie, interpolated between its neighbours. Of no values: 0.
double percentile(std::vector<double> values, double part);

double median(const std::vector<double>& values);

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
