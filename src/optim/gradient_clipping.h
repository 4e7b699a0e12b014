#pragma once

#include <functional>
#include <vector>

#include <lockstep/gradient_tools.h>

namespace lockstep::detail {

/// Combines the norm of these gradients, a scalar, with those of other gradients.
using CombineNorms = std::function<at::Tensor(const at::Tensor& norm, double norm_type)>;

/// clip_grad_norm_() of gradients, which must be dense. The norm that is limited is what `combine` returns.
at::Tensor clip_gradients(const std::vector<at::Tensor>& gradients, double max_norm, const ClipGradNormOptions& options,
                          const CombineNorms& combine);

}  // namespace lockstep::detail
