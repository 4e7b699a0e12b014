#include "bench/report_format.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include <fmt/format.h>

namespace lockstep::bench {

double percentile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double place = part * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(place);
  const auto above = std::min(below + 1, values.size() - 1);
  return std::lerp(values[below], values[above], place - static_cast<double>(below));
}

double median(const std::vector<double>& values) {
  return percentile(values, 0.5);
}

StepTimes step_times(const std::vector<double>& times_us) {
  return {median(times_us) / 1000, percentile(times_us, 0.1) / 1000, percentile(times_us, 0.9) / 1000};
}

std::string milliseconds(double value) {
  const int before = value < 10 ? 1 : static_cast<int>(std::log10(value)) + 1;
  return fmt::format("{:.{}f}", value, std::clamp(4 - before, 0, 3));
}

std::string range(size_t fewest, size_t most) {
  return fewest == most ? fmt::format("{}", most) : fmt::format("{} to {}", fewest, most);
}

std::string multiple(double value) {
  return fmt::format("{:.2f}x", value);
}

}  // namespace lockstep::bench
