#include "bench/step_times.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "bench/statistics.h"

namespace lockstep::bench {

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
