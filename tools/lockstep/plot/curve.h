#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <vector>

#include "cli/svg.h"
#include "plot/metrics_file.h"

namespace lockstep::plot {

/// The exponential moving average of each value, with bias correction: the mean of all values so far, each with
/// `weight` times the weight of the next value. Values that are not finite are unchanged and do not count. `weight` is
/// 0 or more and below 1. Pure.
std::vector<double> smoothed(const std::vector<double>& values, double weight);

/// At most `most` points: the means of groups of consecutive points of equal size, without points whose `y` is not
/// finite. A series with at most `most` points is unchanged. Pure.
Series means(const Series& series, size_t most);

/// Whether the values often change their direction, like the values of a loss. A learning rate is not noisy: it changes
/// its direction a few times. Fewer than ten values are not noisy. Pure.
bool is_noisy(const std::vector<double>& values);

/// Whether the metric is a setting that follows a schedule, by its name, such as "lr" or "group_0/weight_decay". Such a
/// metric is drawn without smoothing, also if it alternates. Pure.
bool is_schedule(std::string_view metric);

/// Connected points.
using Line = std::vector<svg::Point>;

/// Places the points `at(x[i], y[i])` and returns what a picture with columns of width 1 can show: of several
/// consecutive points in a column, only the lowest and the highest are kept, and the ends of a line. A `y` that is not
/// finite interrupts the line, unless the points before and after it are in the same column. Pure.
std::vector<Line> visible_lines(const std::vector<double>& x, const std::vector<double>& y,
                                const std::function<svg::Point(double, double)>& at);

/// Points of the line for markers, at least `distance` apart horizontally. The first point is always included. Pure.
Line marked_points(const Line& line, double distance);

}  // namespace lockstep::plot
