#include "plot/axis.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include <fmt/format.h>

namespace lockstep::plot {
namespace {

/// Numbers outside of these limits are placed at the limit: differences of larger numbers would overflow, and smaller
/// numbers are rounded.
constexpr double kMost = 1e300, kLeast = 1e-290;

double magnitude(const Axis::Range& range) {
  return std::max(std::abs(range.least), std::abs(range.largest));
}

/// The range, widened if it is a single value. `fraction` of the value is added on both sides.
Axis::Range widened(Axis::Range range, double fraction) {
  range = {std::clamp(range.least, -kMost, kMost), std::clamp(range.largest, -kMost, kMost)};
  const double span = range.largest - range.least;
  if (span > kLeast && span > 1e-9 * magnitude(range)) return range;
  const double margin = magnitude(range) > kLeast ? fraction * magnitude(range) : 1;
  return {range.least - margin, range.largest + margin};
}

/// A logarithmic axis takes the same ranges, but stays above 0.
Axis::Range widened_by_factor(Axis::Range range) {
  range = {std::clamp(range.least, kLeast, kMost), std::clamp(range.largest, kLeast, kMost)};
  if (range.largest > 1.01 * range.least) return range;
  return {range.least / 1.5, range.largest * 1.5};
}

/// The number of digits after the point that multiples of `step` need.
int decimals_of(double step) {
  return std::max(0, static_cast<int>(-std::floor(std::log10(step) + 1e-9)));
}

/// "5e-6", "1.5e20".
std::string scientific(double value, double step) {
  const int exponent = static_cast<int>(std::floor(std::log10(std::abs(value)) + 1e-9));
  const int digits = std::clamp(exponent - static_cast<int>(std::floor(std::log10(step) + 1e-9)), 0, 12);
  auto mantissa = fmt::format("{:.{}f}", value / std::pow(10.0, exponent), digits);
  if (digits > 0) mantissa.erase(mantissa.find_last_not_of('0') + 1);
  if (mantissa.back() == '.') mantissa.pop_back();
  return fmt::format("{}e{}", mantissa, exponent);
}

/// Ticks of a logarithmic axis at the factors times each `stride`-th power of ten, from the first power within the
/// bounds.
std::vector<svg::Tick> decades(Axis::Range bounds, std::initializer_list<double> factors, int stride) {
  std::vector<svg::Tick> ticks;
  const int first = static_cast<int>(std::floor(std::log10(bounds.least) + 1e-9));
  const int last = static_cast<int>(std::floor(std::log10(bounds.largest) + 1e-9));
  for (int power = first; power <= last; power += ticks.empty() ? 1 : stride)
    for (const double factor : factors) {
      const double value = factor * std::pow(10.0, power);
      if (value >= bounds.least * (1 - 1e-9) && value <= bounds.largest * (1 + 1e-9))
        ticks.push_back({value, tick_name(value, svg::rounded_down(value), value)});
    }
  return ticks;
}

}  // namespace

std::string tick_name(double value, double step, double largest) {
  if (std::abs(value) < step * 1e-6) return "0";
  if (largest >= 1e15 || largest < 1e-3) return scientific(value, step);
  if (largest >= 1e4) {
    static constexpr const char* kUnits[] = {"", "k", "M", "G", "T"};
    const int unit = std::min(static_cast<int>(std::floor(std::log10(largest) + 1e-9)) / 3, 4);
    const double scale = std::pow(1000.0, unit);
    if (const int decimals = decimals_of(step / scale); decimals <= 2)
      return fmt::format("{:.{}f}{}", value / scale, decimals, kUnits[unit]);
  }
  return fmt::format("{:.{}f}", value, decimals_of(step));
}

Axis::Axis(Range bounds, Places places, bool is_logarithmic)
    : bounds_(bounds), places_(places), is_logarithmic_(is_logarithmic) {}

/// Adds ticks at the multiples of `step` within the bounds. Their labels are in `unit`.
void Axis::add_ticks(double step, double unit, const std::string& suffix) {
  const double first = std::ceil(bounds_.least / step - 1e-6), last = std::floor(bounds_.largest / step + 1e-6);
  for (double i = first; i <= last; ++i) {
    auto name = tick_name(i * step / unit, step / unit, magnitude(bounds_) / unit);
    if (name != "0") name += suffix;
    ticks_.push_back({i * step, std::move(name)});
  }
}

Axis Axis::vertical(Range range, Places places, int most_ticks) {
  range = widened(range, 0.1);
  const double step = svg::rounded_up((range.largest - range.least) / most_ticks);
  const Range bounds{std::floor(range.least / step + 1e-6) * step, std::ceil(range.largest / step - 1e-6) * step};
  Axis axis(bounds, places, false);
  axis.add_ticks(step, 1, "");
  return axis;
}

Axis Axis::logarithmic(Range range, Places places, int most_ticks) {
  range = widened_by_factor(range);
  if (range.largest < 4 * range.least) {  // powers of ten are too far apart
    const auto linear = vertical(range, places, most_ticks);
    if (linear.bounds_.least > 0) {
      Axis axis(linear.bounds_, places, true);
      axis.ticks_ = linear.ticks_;
      return axis;
    }
  }
  const Range bounds{svg::rounded_down(range.least), svg::rounded_up(range.largest)};
  Axis axis(bounds, places, true);
  axis.ticks_ = decades(bounds, {1, 2, 5}, 1);
  if (axis.ticks_.size() <= static_cast<size_t>(most_ticks) + 1) return axis;
  axis.ticks_ = decades(bounds, {1}, 1);
  const int stride = (static_cast<int>(axis.ticks_.size()) + most_ticks - 1) / most_ticks;
  if (stride > 1) axis.ticks_ = decades(bounds, {1}, stride);
  return axis;
}

namespace {

/// The bounds of a horizontal axis.
Axis::Range with_margins(Axis::Range range) {
  constexpr double kMargin = 0.015;  // so that the last marker is not cut
  range = widened(range, 0.5);
  const bool begins_near_zero = range.least >= 0 && range.least < 0.3 * range.largest;
  if (begins_near_zero) range.least = 0;
  const double margin = kMargin * (range.largest - range.least);
  return {begins_near_zero ? 0 : range.least - margin, range.largest + margin};
}

}  // namespace

Axis Axis::horizontal(Range range, Places places, int most_ticks, double least_step) {
  const auto bounds = with_margins(range);
  Axis axis(bounds, places, false);
  axis.add_ticks(std::max(least_step, svg::rounded_up((bounds.largest - bounds.least) / most_ticks)), 1, "");
  return axis;
}

Axis Axis::duration(Range range, Places places, int most_ticks) {
  struct Unit {
    double seconds;
    const char* suffix;
  };
  static constexpr Unit kUnits[] = {{86400, " d"}, {3600, " h"}, {60, " min"}, {1, " s"}};
  const auto bounds = with_margins(range);
  const auto* unit = std::find_if(std::begin(kUnits), std::end(kUnits) - 1,
                                  [&](const Unit& one) { return bounds.largest >= 2 * one.seconds; });
  Axis axis(bounds, places, false);
  const double step = svg::rounded_up((bounds.largest - bounds.least) / unit->seconds / most_ticks);
  axis.add_ticks(step * unit->seconds, unit->seconds, unit->suffix);
  return axis;
}

double Axis::at(double value) const {
  const double inside = std::clamp(value, bounds_.least, bounds_.largest);
  const double part = is_logarithmic_ ? std::log(inside / bounds_.least) / std::log(bounds_.largest / bounds_.least)
                                      : (inside - bounds_.least) / (bounds_.largest - bounds_.least);
  return std::lerp(places_.least, places_.largest, part);
}

}  // namespace lockstep::plot
