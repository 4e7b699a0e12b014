#include "plot/curve.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <cstddef>
#include <optional>
#include <utility>

namespace lockstep::plot {
namespace {

/// The points of a line that are in the same column.
class Column {
 public:
  Column(svg::Point point, double index) : index_(index), first_{point, 0}, lowest_(first_), highest_(first_) {
    last_ = first_;
  }

  double index() const { return index_; }

  void add(svg::Point point) {
    last_ = {point, last_.order + 1};
    if (point.y < lowest_.point.y) lowest_ = last_;
    if (point.y > highest_.point.y) highest_ = last_;
  }

  struct Ends {
    bool first, last;  // whether the line begins or ends in this column
  };

  /// Appends the lowest and the highest point in their order, and the ends of the line.
  void append_to(Line& line, Ends ends) const {
    std::array<Placed, 4> kept{lowest_, highest_, ends.first ? first_ : lowest_, ends.last ? last_ : lowest_};
    std::sort(kept.begin(), kept.end(), [](const Placed& a, const Placed& b) { return a.order < b.order; });
    for (size_t i = 0; i < kept.size(); ++i)
      if (i == 0 || kept[i].order != kept[i - 1].order) line.push_back(kept[i].point);
  }

 private:
  struct Placed {
    svg::Point point;
    size_t order;
  };

  double index_;
  Placed first_, lowest_, highest_, last_;
};

class LineBuilder {
 public:
  void add(svg::Point point) {
    const double index = std::floor(point.x);
    if (column_ && column_->index() == index) {
      column_->add(point);
      is_interrupted_ = false;
      return;
    }
    if (is_interrupted_)
      end_line();
    else if (column_)
      column_->append_to(line_, {.first = line_.empty(), .last = false});
    column_.emplace(point, index);
  }

  void interrupt() { is_interrupted_ = true; }

  std::vector<Line> take() {
    end_line();
    return std::move(lines_);
  }

 private:
  void end_line() {
    if (column_) column_->append_to(line_, {.first = line_.empty(), .last = true});
    if (!line_.empty()) lines_.push_back(std::move(line_));
    line_.clear();
    column_.reset();
    is_interrupted_ = false;
  }

  std::vector<Line> lines_;
  Line line_;                     // its finished columns
  std::optional<Column> column_;  // the unfinished column
  bool is_interrupted_ = false;
};

}  // namespace

std::vector<double> smoothed(const std::vector<double>& values, double weight) {
  std::vector<double> averages;
  averages.reserve(values.size());
  double sum = 0, sum_of_weights = 0;
  for (const double value : values) {
    if (std::isfinite(value)) {
      sum = weight * sum + (1 - weight) * value;
      sum_of_weights = weight * sum_of_weights + (1 - weight);
    }
    averages.push_back(std::isfinite(value) ? sum / sum_of_weights : value);
  }
  return averages;
}

Series means(const Series& series, size_t most) {
  const size_t size = series.x.size(), count = (size + most - 1) / most;
  if (count <= 1) return series;
  Series result;
  for (size_t begin = 0; begin < size; begin += count) {
    double x = 0, y = 0, finite = 0;
    for (size_t i = begin; i < std::min(size, begin + count); ++i) {
      if (!std::isfinite(series.y[i])) continue;
      x += series.x[i];
      y += series.y[i];
      ++finite;
    }
    if (finite > 0)
      result.add(x / finite, y / finite);
    else
      result.add(series.x[begin], series.y[begin]);
  }
  return result;
}

bool is_noisy(const std::vector<double>& values) {
  constexpr size_t kFewest = 10;      // an average of fewer values hides more than it shows
  constexpr double kReversals = 0.2;  // pure noise reverses its direction at two of three points
  size_t reversals = 0, count = 0;
  double last = 0;
  int direction = 0;
  for (const double value : values) {
    if (!std::isfinite(value)) continue;
    const int now = count == 0 || value == last ? 0 : value > last ? 1 : -1;
    if (now != 0 && now == -direction) ++reversals;
    if (now != 0) direction = now;
    last = value;
    ++count;
  }
  return count >= kFewest && static_cast<double>(reversals) > kReversals * static_cast<double>(count);
}

bool is_schedule(std::string_view metric) {
  for (const std::string_view name : {"learning_rate", "momentum", "weight_decay"})
    if (metric.find(name) != metric.npos) return true;
  const auto is_letter = [](char character) { return std::isalpha(static_cast<unsigned char>(character)) != 0; };
  for (auto begin = metric.begin(); begin != metric.end();) {  // each of its words
    const auto word = std::find_if(begin, metric.end(), is_letter);
    begin = std::find_if_not(word, metric.end(), is_letter);
    if (std::string_view(word, begin) == "lr") return true;
  }
  return false;
}

std::vector<Line> visible_lines(const std::vector<double>& x, const std::vector<double>& y,
                                const std::function<svg::Point(double, double)>& at) {
  LineBuilder builder;
  for (size_t i = 0; i < x.size(); ++i) {
    if (std::isfinite(y[i]))
      builder.add(at(x[i], y[i]));
    else
      builder.interrupt();
  }
  return builder.take();
}

Line marked_points(const Line& line, double distance) {
  Line marked;
  for (const auto& point : line)
    if (marked.empty() || std::abs(point.x - marked.back().x) >= distance) marked.push_back(point);
  return marked;
}

}  // namespace lockstep::plot
