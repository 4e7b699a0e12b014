#pragma once

#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Event.h>

#include <lockstep/metric_log.h>

namespace lockstep::detail {

/// The accumulated values of one metric.
struct MetricSum {
  MetricReduction reduce = MetricReduction::kMean;
  double value = 0;   // kMean: of value times weight; otherwise the result so far
  double weight = 0;  // kMean: the sum of weights; otherwise the number of values
  bool steps_only = false;

  double result() const;
  bool operator==(const MetricSum&) const = default;
};

/// Sums by the name of the metric. They can be added up in any grouping, for example by step and then by rank.
class MetricSums {
 public:
  /// Throws UsageError if the metric was added with another `reduce` before.
  void add(std::string_view name, double value, const MetricOptions& options);
  /// Adds the sums of another rank or of an earlier period. Of two last values, keeps the value of `other`, unless
  /// `keeps_last` is set.
  void merge(const MetricSums& other, bool keeps_last = false);
  /// Returns the sums of metrics that epoch records have.
  MetricSums of_epochs() const;
  void clear() { sums_.clear(); }
  bool empty() const { return sums_.empty(); }
  std::map<std::string, double> results() const;
  const std::map<std::string, MetricSum, std::less<>>& sums() const { return sums_; }

  /// For messages and checkpoints.
  c10::IValue to_ivalue() const;
  static MetricSums from_ivalue(const c10::IValue& value);

 private:
  friend class DeviceSums;
  void merge(const std::string& name, const MetricSum& sum, bool keeps_last);

  std::map<std::string, MetricSum, std::less<>> sums_;
};

/// Merges the sums of all ranks, in the order of ranks: the last value is that of the lowest rank which has one.
MetricSums merged(const std::vector<MetricSums>& ranks);

/// Exponentially smoothed values, without the bias of the first values.
class Smoothed {
 public:
  double add(double value) {
    constexpr double kDecay = 0.6;
    if (!std::isfinite(value)) return value;
    sum_ = kDecay * sum_ + (1 - kDecay) * value;
    weight_ = kDecay * weight_ + (1 - kDecay);
    return sum_ / weight_;
  }

 private:
  double sum_ = 0, weight_ = 0;
};

/// Sums on a GPU, which a thread can copy to the host later without blocking the GPU or the training thread.
class DeviceSums {
 public:
  /// A copy to host memory that may still be in progress.
  class Copy {
   public:
    /// Waits for the copy. Call it on any thread.
    MetricSums wait() const;

   private:
    friend DeviceSums;
    std::map<std::string, MetricSum, std::less<>> sums_;  // without the values
    std::vector<std::string> names_;                      // by element of values_
    at::Tensor values_;
    std::shared_ptr<c10::Event> arrival_;
  };

  /// Adds a value that is on a GPU. Queues one kernel.
  void add(std::string_view name, const at::Tensor& value, const MetricOptions& options);
  bool empty() const { return !has_values_; }
  /// Starts a copy of the sums and resets them.
  Copy take();

 private:
  size_t index_of(std::string_view name, const MetricOptions& options, c10::Device device);

  struct Slot {
    MetricSum sum;  // its value is on the device
    size_t index;
  };
  std::map<std::string, Slot, std::less<>> slots_;
  at::Tensor values_, initial_;  // on the device, float64: one element for each slot
  bool has_values_ = false;
};

}  // namespace lockstep::detail
