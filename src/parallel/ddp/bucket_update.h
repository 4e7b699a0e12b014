#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep::detail {

/// The interface of an optimizer that processes buckets of gradients while backward runs, instead of the plain average:
/// see ZeroRedundancyOptions::overlap. The reducer calls it; all calls are collective.
class BucketUpdate {
 public:
  struct Bucket {
    size_t index;                        // of Plan::buckets, if prepare() has returned layouts
    at::Tensor buffer;                   // flat, from ProcessGroup::allocate: this rank's gradients
    std::vector<at::Tensor> parameters;  // the parameters to update
    std::vector<at::Tensor> gradients;   // of these parameters: views of the buffer, with their sizes and strides
    at::Tensor extra;                    // further elements to average, or undefined; without layouts, in the buffer
    at::Tensor averaged_extra;           // receives the average of `extra` on every rank; not in the buffer
  };

  struct Plan {
    std::vector<std::pair<std::string, at::Tensor>> parameters;
    std::vector<std::vector<size_t>> buckets;  // indices into parameters
  };

  /// The positions of a bucket's gradients in its buffer, in elements.
  struct Layout {
    std::vector<int64_t> offsets;
    int64_t elements = 0;  // of the buffer, without `extra`
  };

  struct Started {
    std::optional<Work> reduced;   // when it is done, no rank reads the buffer any more
    std::function<void()> finish;  // blocks until all work that update() has started is done
  };

  virtual ~BucketUpdate() = default;

  /// Prepares updates of all parameters of the plan. Returns the layout of each bucket, whose parameters must then stay
  /// the same; or nothing if buckets may have any parameters and any layout. Throws UsageError on all ranks.
  virtual std::vector<Layout> prepare(const Plan& plan) = 0;

  /// Starts to average the gradients of one bucket over all ranks and to update its parameters. Changes the version of
  /// the parameters before it returns, so that autograd refuses to use the old values afterwards; not if the update
  /// waits for the optimizer's step().
  [[nodiscard]] virtual Started update(const Bucket& bucket) = 0;
  /// Like update(), but blocks until the update is done. Runs on the calling thread if no earlier call is pending.
  virtual void update_and_finish(const Bucket& bucket) = 0;
  /// Forgets the updates of a backward that was only captured in a CUDA graph, because the capture has failed.
  virtual void abandon() = 0;
};

}  // namespace lockstep::detail
