#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// How much this rank's gradients count in the average. Not thread-safe.
class BatchWeight {
 public:
  explicit BatchWeight(ProcessGroup group);

  /// What this rank's batch counts; 1 at first. Local. UsageError unless above 0.
  void choose(double samples);
  double samples() const { return samples_; }

  /// Begins to add up what all ranks have chosen. Collective, and returns at once.
  void add_up();
  /// The same, where the sum is known already. Local.
  void set_sum(double sum) { sum_ = sum; }
  /// All ranks count alike again. Local.
  void reset();

  /// What to multiply this rank's gradients by so that the average over the ranks is the weighted one. Waits for the
  /// sum.
  double factor();

 private:
  const ProcessGroup group_;
  double samples_ = 1;
  double sum_;                // of all ranks' samples
  at::Tensor adding_;         // becomes the sum
  std::optional<Work> work_;  // while the ranks' samples are being added
};

}  // namespace lockstep
