#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// How much this rank's gradients count in the average. Not thread-safe.
class BatchWeight {
 public:
  explicit BatchWeight(ProcessGroup group);

  /// What this rank's batches count from now on; all ranks alike at first. Collective, and returns at once. UsageError
  /// unless above 0.
  void set(double samples);

  /// The same inside a join, where a round adds up: local, and until the join ends.
  void set_in_join(double samples);
  double samples_in_join() const { return in_join_.value_or(samples_); }
  bool is_set() const { return is_set_ || in_join_; }

  /// What counts in this round of a join: this rank's samples, and those of all that train.
  void begin_round(double samples, double sum) { round_ = {samples, sum}; }
  /// What was set before the join counts again.
  void leave_join();

  /// What to multiply this rank's gradients by so that the average over the ranks is the weighted one. Waits for the
  /// sum.
  double factor();

 private:
  struct Share {
    double samples;
    double sum;  // of all ranks
  };

  void check(double samples) const;

  const ProcessGroup group_;
  bool is_set_ = false;
  double samples_ = 1;
  double sum_;                     // of all ranks' samples
  at::Tensor adding_;              // becomes the sum
  std::optional<Work> work_;       // while the ranks' samples are being added
  std::optional<double> in_join_;  // set inside of a join
  std::optional<Share> round_;     // of a join
};

}  // namespace lockstep
