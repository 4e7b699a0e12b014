#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>

namespace lockstep {

struct ClipGradNormOptions {
  double norm_type = 2;
  /// Error, before any gradient changes, when the norm is not a number or infinite. On a GPU this waits for it.
  bool error_if_nonfinite = false;
};

/// Scales the gradients of these parameters, taken as one vector, so that their norm is at most `max_norm`, and returns
/// what it was: a tensor on the first gradient's device. Between backward and step; gradients that were averaged are
/// equal on all ranks, so that every rank scales by the same. Unlike LibTorch's it does not wait for a GPU, and can be
/// captured.
LOCKSTEP_EXPORT at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                           const ClipGradNormOptions& options = {});

/// Gradients that are zero in every element become none, so that the optimizer leaves their parameters alone, where
/// momentum or weight decay would move them: for models of which a step uses only a part. Returns how many. On a GPU
/// this waits for it, once.
LOCKSTEP_EXPORT size_t drop_zero_gradients(const std::vector<at::Tensor>& parameters);

}  // namespace lockstep
