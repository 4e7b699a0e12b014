#include "bench/log_axis.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

namespace lockstep::bench {
namespace {

constexpr double kLeastMicroseconds = 0.001;

std::string bytes_name(int power) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  const int unit = std::min(power / 10, 4);
  return fmt::format("{} {}", int64_t{1} << (power - 10 * unit), kUnits[unit]);
}

/// Of a value in microseconds: "200 ns", "1 ms".
std::string time_name(double value) {
  static constexpr const char* kUnits[] = {"ns", "\u00b5s", "ms", "s"};
  double scaled = value * 1000;
  int unit = 0;
  for (; unit < 3 && scaled >= 999.5; ++unit) scaled /= 1000;
  return fmt::format("{:g} {}", std::round(scaled), kUnits[unit]);
}

/// The largest of 1, 2 and 5 times a power of ten that is not above.
double rounded_down(double value) {
  const double ten = std::pow(10, std::floor(std::log10(value) + 1e-9));
  for (double step : {5.0, 2.0})
    if (step * ten <= value * (1 + 1e-9)) return step * ten;
  return ten;
}

double rounded_up(double value) {
  const double ten = std::pow(10, std::floor(std::log10(value) - 1e-9));
  for (double step : {1.0, 2.0, 5.0})
    if (step * ten >= value * (1 - 1e-9)) return step * ten;
  return 10 * ten;
}

}  // namespace

LogAxis::LogAxis(double least, double largest, Places places)
    : least_(std::log(least)), largest_(std::log(largest)), places_(places) {}

LogAxis LogAxis::of_bytes(double least, double largest, Places places) {
  if (least == largest) {  // one size, in the middle
    least /= 2;
    largest *= 2;
  }
  LogAxis axis(least, largest, places);
  const int first = static_cast<int>(std::ceil(std::log2(std::max(least, 1.0)) - 1e-9));
  const int last = static_cast<int>(std::floor(std::log2(largest) + 1e-9));
  constexpr int kMostTicks = 8;
  const int step = (last - first) / kMostTicks + 1;
  for (int power = first; power <= last; power += step) axis.ticks_.push_back({std::pow(2, power), bytes_name(power)});
  return axis;
}

LogAxis LogAxis::of_microseconds(double least, double largest, Places places) {
  const double from = rounded_down(std::max(least, kLeastMicroseconds));
  const double to = std::max(rounded_up(std::max(largest, kLeastMicroseconds)), 2 * from);
  LogAxis axis(from, to, places);
  const bool is_short = to / from < 500;  // powers of ten alone would leave two ticks or fewer
  for (double ten = std::pow(10, std::floor(std::log10(from) + 1e-9)); ten <= to * (1 + 1e-9); ten *= 10)
    for (double step : {1.0, 2.0, 5.0})
      if ((step == 1 || is_short) && step * ten >= from * (1 - 1e-9) && step * ten <= to * (1 + 1e-9))
        axis.ticks_.push_back({step * ten, time_name(step * ten)});
  return axis;
}

double LogAxis::at(double value) const {
  const double part = (std::log(std::max(value, kLeastMicroseconds)) - least_) / (largest_ - least_);
  return std::lerp(places_.least, places_.largest, part);
}

}  // namespace lockstep::bench
