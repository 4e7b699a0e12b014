#include "ui/curve.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lockstep::ui {
namespace {

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

/// The exponential moving average with bias correction, one value after the other.
class Smoother {
 public:
  explicit Smoother(double weight) : weight_(weight) {}

  /// The mean including this value. A value that is not finite does not count.
  double add(double value) {
    if (!std::isfinite(value)) return value;
    sum_ = weight_ * sum_ + (1 - weight_) * value;
    sum_of_weights_ = weight_ * sum_of_weights_ + (1 - weight_);
    return sum_ / sum_of_weights_;
  }

 private:
  const double weight_;
  double sum_ = 0, sum_of_weights_ = 0;
};

/// Consecutive points that are drawn at one place.
struct Bucket {
  double x = kNothing, low = kNothing, high = kNothing, smooth = kNothing;

  void add(double at, double value, double smoothed) {
    x = at;
    if (!std::isfinite(value)) return;
    low = std::fmin(low, value);
    high = std::fmax(high, value);
    smooth = smoothed;
  }
};

class CurveBuilder {
 public:
  CurveBuilder(Curve& curve, const CurveRequest& request, double from, double to)
      : curve_(curve), is_logarithmic_(request.is_x_logarithmic), begin_(placed(from)) {
    const double width = (placed(to) - begin_) / static_cast<double>(request.buckets);
    scale_ = width > 0 ? 1 / width : 0;
  }

  void add(double x, double value, double smoothed) {
    const double place = std::floor((placed(x) - begin_) * scale_);
    if (place != place_) finish();
    place_ = place;
    bucket_.add(x, value, smoothed);
  }

  /// A point of its own, outside of the buckets.
  void add_alone(double x, double value, double smoothed) {
    finish();
    bucket_.add(x, value, smoothed);
    finish();
  }

  void finish() {
    if (std::isnan(bucket_.x)) return;
    curve_.x.push_back(bucket_.x);
    curve_.low.push_back(bucket_.low);
    curve_.high.push_back(bucket_.high);
    curve_.smooth.push_back(bucket_.smooth);
    bucket_ = {};
  }

 private:
  double placed(double x) const { return is_logarithmic_ ? std::log10(std::max(x, 1e-300)) : x; }

  Curve& curve_;
  const bool is_logarithmic_;
  const double begin_;
  double scale_ = 0;
  double place_ = 0;
  Bucket bucket_;  // without a position while it is empty
};

struct Point {
  double x = kNothing, value = kNothing, smoothed = kNothing;

  bool is_set() const { return !std::isnan(x); }
};

void find_extremes(Curve& curve, const Column& column, const std::vector<double>& x) {
  curve.first_x = curve.last_x = curve.last = curve.lowest = curve.highest = kNothing;
  for (size_t i = 0; i < column.rows.size(); ++i) {
    const double at = x[column.rows[i]];
    if (std::isnan(at)) continue;
    ++curve.points;
    curve.first_x = std::fmin(curve.first_x, at);
    curve.last_x = std::fmax(curve.last_x, at);
    const double value = column.values[i];
    if (!std::isfinite(value)) continue;
    curve.last = value;
    if (!(value >= curve.lowest)) curve.lowest = value;
    if (!(value <= curve.highest)) curve.highest = value;
  }
}

}  // namespace

Curve curve_of(const RecordTable& table, int metric, const CurveRequest& request) {
  Curve curve;
  static const Column kEmpty;
  const bool is_known = metric >= 0 && static_cast<size_t>(metric) < table.columns.size();
  const auto& column = is_known ? table.columns[static_cast<size_t>(metric)] : kEmpty;
  const auto& x = table.positions(request.x);
  find_extremes(curve, column, x);
  const double from = std::isfinite(request.from) ? request.from : curve.first_x;
  const double to = std::isfinite(request.to) ? request.to : curve.last_x;
  CurveBuilder builder(curve, request, from, to);
  Smoother smoother(request.smoothing);
  Point before;
  bool is_behind = false;
  for (size_t i = 0; i < column.rows.size(); ++i) {
    const double at = x[column.rows[i]];
    if (std::isnan(at)) continue;
    const Point point{at, column.values[i], smoother.add(column.values[i])};
    if (at < from) {
      before = point;
    } else if (at > to) {
      if (before.is_set()) builder.add_alone(before.x, before.value, before.smoothed);
      before = {};
      if (!is_behind) builder.add_alone(point.x, point.value, point.smoothed);
      is_behind = true;
    } else {
      if (before.is_set()) builder.add_alone(before.x, before.value, before.smoothed);
      before = {};
      is_behind = false;
      builder.add(point.x, point.value, point.smoothed);
    }
  }
  builder.finish();
  return curve;
}

}  // namespace lockstep::ui
