#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <lockstep/call_options.h>
#include <lockstep/export.h>
#include <lockstep/process_group.h>
#include <lockstep/value.h>

namespace lockstep {

// Metrics over the samples of all ranks. add() is called for each batch. It adds to sums on the metric's device,
// without blocking, and can be captured in a CUDA graph. compute() adds the sums of all ranks and blocks.
//
// add(), reset() and compute() without a group are not collective. compute(group) is: one all-reduce, after which every
// rank has the same result and its own sums are unchanged, so it may be called during an epoch and at its end. Ranks
// may add different numbers of batches. Sums are float64; sums of integers are exact up to 2^53.
//
// Construct a metric for the device of the tensors to add: `MeanMetric loss(world.device())`. add() throws UsageError
// for a tensor on a GPU if the metric is on another device, because the copy would block. Not thread-safe.
//
// state_dict() is a copy of this rank's sums. In a TrainingState, add a metric with add_per_rank().

/// A fixed number of sums, for custom metrics: add values that are summed over samples, and combine the sums at the
/// end.
///
///     lockstep::SumMetric counts(3, world.device());
///     counts.add(torch::stack({true_positives, false_positives, false_negatives}));
///     const auto sums = counts.compute(world);
///     const double f1 = 2 * sums[0] / (2 * sums[0] + sums[1] + sums[2]);
class LOCKSTEP_EXPORT SumMetric {
 public:
  /// Throws UsageError unless `count`, the number of sums, is 1 or more.
  explicit SumMetric(int64_t count, c10::Device device = c10::kCPU);

  /// Adds `values`, which have shape [count], one to each sum. Any dtype that converts to float64. Throws UsageError
  /// for another shape.
  void add(const at::Tensor& values);

  /// Returns the sums over all ranks of the group. Collective.
  std::vector<double> compute(const ProcessGroup& group, const CallOptions& options = {}) const;
  /// Returns the sums of this rank.
  std::vector<double> compute() const;
  void reset();
  c10::Device device() const { return sums_.device(); }

  Value state_dict() const;
  /// Throws UsageError unless `state` is a tensor of shape [count].
  void load_state_dict(const Value& state);

 private:
  at::Tensor sums_;
};

/// The mean of values, for example of losses, weighted by numbers of samples. NaN without samples. A value that is NaN
/// makes the mean NaN (torchmetrics leaves such values out), unless its weight is 0, as for an empty batch.
class LOCKSTEP_EXPORT MeanMetric {
 public:
  explicit MeanMetric(c10::Device device = c10::kCPU) : sums_(2, device) {}

  /// Adds the mean loss of a batch, of any dtype, with the batch's number of samples as its weight. A tensor of several
  /// values adds each of them with this weight.
  void add(const at::Tensor& values, double weight = 1);
  /// The same with a weight for each value. Throws UsageError unless the weights have the shape of the values.
  void add(const at::Tensor& values, const at::Tensor& weights);
  void add(double value, double weight = 1);

  /// Returns the mean over all ranks of the group. Collective.
  double compute(const ProcessGroup& group, const CallOptions& options = {}) const;
  /// Returns the mean of this rank.
  double compute() const;
  void reset() { sums_.reset(); }

  Value state_dict() const { return sums_.state_dict(); }
  void load_state_dict(const Value& state) { sums_.load_state_dict(state); }

 private:
  SumMetric sums_;  // of weighted values, and of weights
};

struct AccuracyOptions {
  /// A sample is correct if its label is among the classes with the `top_k` largest outputs.
  int64_t top_k = 1;
  /// Samples with this label do not count.
  std::optional<int64_t> ignore_index{};
};

/// The fraction of samples that a classifier labels correctly: from 0 to 1, NaN without samples.
class LOCKSTEP_EXPORT Accuracy {
 public:
  /// Throws UsageError unless top_k is 1 or more.
  explicit Accuracy(c10::Device device = c10::kCPU, const AccuracyOptions& options = {});

  /// Adds a batch. `outputs` has shape [N, classes, ...]: logits, or any other scores of which the largest wins.
  /// `labels` are integers and have shape [N, ...]. Throws UsageError for other shapes and for fewer than top_k
  /// classes.
  void add(const at::Tensor& outputs, const at::Tensor& labels);

  /// Returns the accuracy over all ranks of the group. Collective.
  double compute(const ProcessGroup& group, const CallOptions& options = {}) const;
  /// Returns the accuracy of this rank.
  double compute() const;
  void reset() { sums_.reset(); }

  Value state_dict() const { return sums_.state_dict(); }
  void load_state_dict(const Value& state) { sums_.load_state_dict(state); }

 private:
  AccuracyOptions options_;
  SumMetric sums_;  // of correct samples, and of samples
};

}  // namespace lockstep
