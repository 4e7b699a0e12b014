#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep::detail {

/// What an optimizer does with buckets of gradients while backward runs, in place of the plain average: see
/// ZeroRedundancyOptions::overlap. The reducer calls it; all calls are collective.
class BucketUpdate {
 public:
  struct Bucket {
    size_t index;                        // of Plan::buckets, if prepare() has returned layouts
    at::Tensor buffer;                   // flat, from ProcessGroup::allocate: this rank's gradients
    std::vector<at::Tensor> parameters;  // those that are updated
    std::vector<at::Tensor> gradients;   // of these parameters: views of the buffer, with their sizes and strides
    at::Tensor extra;                    // further elements to average, or undefined; without layouts, in the buffer
    at::Tensor averaged_extra;           // where their average goes, on every rank: not in the buffer
  };

  struct Plan {
    std::vector<std::pair<std::string, at::Tensor>> parameters;
    std::vector<std::vector<size_t>> buckets;  // indices into parameters
  };

  /// Where the gradients of a bucket lie in its buffer, in elements.
  struct Layout {
    std::vector<int64_t> offsets;
    int64_t elements = 0;  // of the buffer, without `extra`
  };

  struct Started {
    std::optional<Work> reduced;   // when it is done, no rank reads the buffer any more
    std::function<void()> finish;  // blocks until all that update() has started is done
  };

  virtual ~BucketUpdate() = default;

  /// Prepares updates of all parameters of the plan. Returns the layout of each bucket, whose parameters must then stay
  /// the same; or nothing if buckets may have any parameters and any layout. Throws UsageError on all ranks.
  virtual std::vector<Layout> prepare(const Plan& plan) = 0;

  /// Starts to average the gradients of one bucket over all ranks and to update its parameters. Changes the version of
  /// the parameters before it returns, so that autograd refuses to use the old values afterwards; not if the update
  /// waits for the optimizer's step().
  [[nodiscard]] virtual Started update(const Bucket& bucket) = 0;
  /// The same, and finishes it. Runs on the calling thread if no earlier call is pending.
  virtual void update_and_finish(const Bucket& bucket) = 0;
  /// Forgets the updates of a backward that was only captured in a CUDA graph, because the capture has failed.
  virtual void abandon() = 0;
};

}  // namespace lockstep::detail
