#pragma once

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>
#include <lockstep/process_group.h>

namespace lockstep {

/// Updates parameters from buckets of gradients while backward runs. ZeroRedundancyOptimizer::bucket_update() returns
/// one, and DistributedDataParallel::update_in_backward() uses it.
class LOCKSTEP_EXPORT BucketUpdate {
 public:
  struct Bucket {
    at::Tensor buffer;                   // flat, from ProcessGroup::allocate: this rank's gradients
    std::vector<at::Tensor> parameters;  // those that are updated
    std::vector<at::Tensor> gradients;   // of these parameters: views of the buffer, with their sizes and strides
    at::Tensor extra;                    // further elements of the buffer that are averaged, or undefined
    at::Tensor averaged_extra;           // where their average goes, on every rank: not in the buffer
  };

  virtual ~BucketUpdate() = default;

  /// Checks that all of these parameters can be updated with gradients of this group. Collective. Throws UsageError.
  virtual void check(const ProcessGroup& group, const std::vector<std::pair<std::string, at::Tensor>>& parameters) = 0;

  /// Starts to average the gradients of one bucket over all ranks and to update its parameters. When the Work is done,
  /// all ranks have the new parameters and do not read the buffer any more. Collective. Changes the version of the
  /// parameters before it returns, so that autograd refuses to use the old values afterwards.
  [[nodiscard]] virtual Work update(const Bucket& bucket) = 0;
  /// The same, and waits for it. Runs on the calling thread if no earlier call is pending.
  virtual void update_and_wait(const Bucket& bucket) = 0;
};

}  // namespace lockstep
