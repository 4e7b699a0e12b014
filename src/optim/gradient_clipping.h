#pragma once

#include <functional>
#include <vector>

#include <lockstep/gradient_tools.h>

namespace lockstep::detail {

/// Combines the norm of these gradients, a scalar, with the norms of other gradients.
using CombineNorms = std::function<at::Tensor(const at::Tensor& norm, double norm_type)>;

/// clip_grad_norm_() of gradients, which must be dense. Limits the norm that `combine` returns.
at::Tensor clip_gradients(const std::vector<at::Tensor>& gradients, double max_norm, const ClipGradNormOptions& options,
                          const CombineNorms& combine);

}  // namespace lockstep::detail
