#include "bench/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

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

}  // namespace lockstep::bench
