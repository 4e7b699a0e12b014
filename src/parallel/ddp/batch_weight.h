#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// How much this rank's gradients count in the average: each gradient is multiplied by `samples * ranks / sum of all
/// ranks' samples` before it accumulates, so that the plain average over the ranks is the mean over all samples.
///
/// On a GPU the factor stays in the GPU's memory: the host never waits for it, and a captured step reads the value that
/// was set last. Not thread-safe.
class BatchWeight {
 public:
  explicit BatchWeight(ProcessGroup group);

  /// Sets the samples of this rank's batches from now on; before the first call all ranks count alike. Collective, and
  /// returns at once. UsageError unless finite and 0 or more.
  void set(double samples);

  /// The same inside a join, where a round adds up the ranks' samples: local, and until the join ends.
  void set_in_join(double samples);
  double samples_in_join() const { return in_join_.value_or(samples_); }
  bool is_set() const { return is_set_ || in_join_; }

  /// Sets this rank's samples and the sum of all ranks' samples for one round of a join.
  void begin_round(double samples, double sum) { round_ = {samples, sum}; }
  /// What was set before the join counts again.
  void leave_join();

  /// On a CPU: waits for the sum of the ranks' samples. UsageError on every rank when the sum is 0. On a GPU the sum is
  /// not looked at: gradients are NaN when it is 0, as LibTorch's mean of no samples is.
  void wait_for_sum();

  /// The gradient times this rank's factor; zeros when its weight is 0, even if the gradient is NaN. Autograd can
  /// differentiate it.
  at::Tensor apply(const at::Tensor& gradient);

 private:
  struct Share {
    double samples;
    double sum;  // of all ranks
  };
  /// In the memory of a GPU. A captured step reads it, so it stays in its place.
  struct OnDevice {
    at::Tensor samples;   // 1 element
    at::Tensor sum;       // 1 element: of all ranks' samples
    at::Tensor factor;    // a scalar
    at::Tensor is_empty;  // a scalar: samples are 0
  };

  void check(double samples) const;
  void set_on_device();

  const ProcessGroup group_;
  bool is_set_ = false;
  double samples_ = 1;
  double sum_;                     // on a CPU: of all ranks' samples
  at::Tensor adding_;              // on a CPU: becomes the sum
  std::optional<Work> work_;       // on a CPU: while the ranks' samples are being added
  OnDevice on_device_;             // on a GPU, once a weight was set
  std::optional<double> in_join_;  // set inside a join
  std::optional<Share> round_;     // of a join
};

}  // namespace lockstep
