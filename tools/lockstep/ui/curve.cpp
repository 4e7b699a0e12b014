#include "ui/curve.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace lockstep::ui {
namespace {

constexpr double kNothing = std::numeric_limits<double>::quiet_NaN();

/// The exponential moving average with bias correction. Not divided yet, which would take most of the time.
struct Average {
  double sum = kNothing, sum_of_weights = 1;

  double value() const { return sum / sum_of_weights; }
};

/// Computes the average after each value.
class Smoother {
 public:
  explicit Smoother(double weight) : weight_(weight) {}

  /// A value that is not finite does not count.
  Average add(double value) {
    if (!std::isfinite(value)) return {};
    average_.sum = weight_ * average_.sum + (1 - weight_) * value;
    average_.sum_of_weights = weight_ * average_.sum_of_weights + (1 - weight_);
    return average_;
  }

 private:
  const double weight_;
  Average average_{0, 0};
};

struct Point {
  double x = kNothing, value = kNothing;
  Average average{};

  bool is_set() const { return !std::isnan(x); }
};

/// Consecutive points that are drawn at one position. std::fmin and std::floor are not used: they are function calls.
struct Bucket {
  double x = kNothing, low = kNothing, high = kNothing;
  Average average{};

  void add(const Point& point) {
    x = point.x;
    if (!std::isfinite(point.value)) return;
    if (!(point.value >= low)) low = point.value;
    if (!(point.value <= high)) high = point.value;
    average = point.average;
  }
};

class CurveBuilder {
 public:
  CurveBuilder(Curve& curve, const CurveRequest& request, double from, double to)
      : curve_(curve), is_logarithmic_(request.is_x_logarithmic), begin_(placed(from)) {
    const double width = (placed(to) - begin_) / static_cast<double>(request.buckets);
    scale_ = width > 0 ? 1 / width : 0;
  }

  void add(const Point& point) {
    const auto place = static_cast<int64_t>((placed(point.x) - begin_) * scale_);
    if (place != place_) finish();
    place_ = place;
    bucket_.add(point);
  }

  /// Adds a point outside of the buckets.
  void add_alone(const Point& point) {
    finish();
    bucket_.add(point);
    finish();
  }

  void finish() {
    if (std::isnan(bucket_.x)) return;
    curve_.x.push_back(bucket_.x);
    curve_.low.push_back(bucket_.low);
    curve_.high.push_back(bucket_.high);
    curve_.smooth.push_back(bucket_.average.value());
    bucket_ = {};
  }

 private:
  double placed(double x) const { return is_logarithmic_ ? std::log10(std::max(x, 1e-300)) : x; }

  Curve& curve_;
  const bool is_logarithmic_;
  const double begin_;
  double scale_ = 0;
  int64_t place_ = 0;
  Bucket bucket_;  // without a position while it is empty
};

void find_extremes(Curve& curve, const live::Column& column, const std::vector<double>& x) {
  curve.first_x = curve.last_x = curve.last = curve.lowest = curve.highest = kNothing;
  for (size_t i = 0; i < column.rows.size(); ++i) {
    const double at = x[column.rows[i]];
    if (std::isnan(at)) continue;
    ++curve.points;
    if (!(at >= curve.first_x)) curve.first_x = at;
    if (!(at <= curve.last_x)) curve.last_x = at;
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
  static const live::Column kEmpty;
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
      if (before.is_set()) builder.add_alone(before);
      before = {};
      if (!is_behind) builder.add_alone(point);
      is_behind = true;
    } else {
      if (before.is_set()) builder.add_alone(before);
      before = {};
      is_behind = false;
      builder.add(point);
    }
  }
  builder.finish();
  return curve;
}

}  // namespace lockstep::ui
