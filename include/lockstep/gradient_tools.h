#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/export.h>

namespace lockstep {

struct ClipGradNormOptions {
  double norm_type = 2;
  /// Throws Error, before any gradient changes, if the norm is NaN or infinite. Blocks until the GPU has computed the
  /// norm.
  bool error_if_nonfinite = false;
};

/// Scales the gradients of these parameters, treated as one vector, so that their norm is at most `max_norm`. Returns
/// the norm before scaling, on the device of the first parameter that has a gradient. Call it between backward and
/// step. Not collective: averaged gradients are equal on all ranks, so every rank scales by the same factor. Unlike
/// LibTorch's function, it does not wait for the GPU and can be captured in a CUDA graph. Throws UsageError if
/// `max_norm` is negative or a gradient is sparse.
LOCKSTEP_EXPORT at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                           const ClipGradNormOptions& options = {});

/// Limits each element of the gradients of these parameters to [-max_value, max_value]. Call it between backward and
/// step. Not collective: averaged gradients are equal on all ranks. Does not wait for the GPU and can be captured in a
/// CUDA graph. Throws UsageError if `max_value` is negative or a gradient is sparse.
LOCKSTEP_EXPORT void clip_grad_value_(const std::vector<at::Tensor>& parameters, double max_value);

/// Resets all gradients that are entirely zero to undefined and returns their number. The optimizer then skips these
/// parameters, which momentum or weight decay would otherwise change. For models in which a step uses only some of the
/// parameters. Not collective. On a GPU it blocks once. Throws UsageError if a gradient is sparse.
LOCKSTEP_EXPORT size_t drop_zero_gradients(const std::vector<at::Tensor>& parameters);

}  // namespace lockstep
