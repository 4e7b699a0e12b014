#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// The weight of this rank's gradients in the average. Each gradient is multiplied by `samples * ranks / sum of all
/// ranks' samples` before it accumulates, so the plain average over the ranks is the mean over all samples.
///
/// On a GPU the factor stays in GPU memory: the host never waits for it, and a captured step reads the value that was
/// set last. Not thread-safe.
class BatchWeight {
 public:
  explicit BatchWeight(ProcessGroup group);

  /// Sets the number of samples of this rank's batches from now on. Before the first call all ranks have equal weight.
  /// Collective; does not block. Throws UsageError unless `samples` is finite and 0 or more.
  void set(double samples);

  /// Sets the number of samples inside a join, until the join ends. Local: each round of the join adds up the ranks'
  /// samples. Throws UsageError unless `samples` is finite and 0 or more.
  void set_in_join(double samples);
  double samples_in_join() const { return in_join_.value_or(samples_); }
  bool is_set() const { return is_set_ || in_join_; }

  /// Sets this rank's number of samples and the sum over all ranks for one round of a join.
  void begin_round(double samples, double sum) { round_ = {samples, sum}; }
  /// Restores the weight that was set before the join.
  void leave_join();

  /// On a CPU, blocks until the sum of the ranks' samples is known. Throws UsageError on every rank if the sum is 0.
  /// On a GPU the host does not read the sum of set(): if all ranks set 0, apply() returns zeros on every rank. The sum
  /// of a join's round is checked on both.
  void wait_for_sum();

  /// Returns the gradient times this rank's factor, or zeros if this rank's weight is 0, even if the gradient is NaN.
  /// Autograd can differentiate the result. Fails as wait_for_sum() does.
  at::Tensor apply(const at::Tensor& gradient);

 private:
  struct Share {
    double samples;
    double sum;  // of all ranks' samples
  };
  /// Tensors in GPU memory. Captured steps read them, so their addresses never change.
  struct OnDevice {
    at::Tensor samples;   // 1 element
    at::Tensor sum;       // 1 element: sum of all ranks' samples
    at::Tensor factor;    // scalar
    at::Tensor is_empty;  // scalar: whether samples is 0
  };

  void check(double samples) const;
  void set_on_device();

  const ProcessGroup group_;
  bool is_set_ = false;
  double samples_ = 1;
  double sum_;                     // CPU only: of all ranks' samples
  at::Tensor adding_;              // CPU only: buffer of the all-reduce
  std::optional<Work> work_;       // CPU only: the running all-reduce of the samples
  OnDevice on_device_;             // GPU only, after the first set()
  std::optional<double> in_join_;  // the weight that was set inside the join
  std::optional<Share> round_;     // of the current round of a join
};

}  // namespace lockstep
