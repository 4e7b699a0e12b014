#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

namespace lockstep {

/// Predicts which parameters get no gradient in the next backward: the parameters on which no output of forward
/// depends. Their buckets then need not wait for the end of backward.
///
/// A loss may also depend on tensors that forward did not return, and recomputed segments are not in the graph of the
/// outputs. The first backward therefore only compares: if a gradient arrives that was not predicted, nothing is
/// predicted from then on. Not thread-safe.
class ReachableParameters {
 public:
  explicit ReachableParameters(size_t parameters) : reachable_(parameters) {}

  /// Call it after each forward. `accumulators` are the gradient accumulators of the parameters; null if frozen. Walks
  /// over the graph of the outputs.
  void note(const std::vector<at::Tensor>& outputs, const std::vector<const torch::autograd::Node*>& accumulators);

  /// Whether the next backward will give the parameter no gradient.
  bool excludes(size_t parameter) const { return trust_ == Trust::kTrusted && is_known_ && !reachable_[parameter]; }

  /// Call it at the end of a backward that was reduced, with the parameters that got a gradient in it.
  void compare(const std::vector<char>& got_gradient);

 private:
  enum class Trust { kUnproven, kTrusted, kDistrusted };

  Trust trust_ = Trust::kUnproven;
  // Over the forwards since the last reduction:
  bool has_forward_ = false;
  bool is_known_ = false;        // every forward returned a tensor with a graph
  std::vector<char> reachable_;  // by parameter
};

}  // namespace lockstep
