#pragma once

#include <ATen/ATen.h>

namespace lockstep::detail {

/// Returns the elements of a dense tensor in memory order, as a flat view.
inline at::Tensor as_row(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1});
}

/// Returns the tensor itself if it has the parameter's strides; otherwise a copy with the parameter's strides.
inline at::Tensor laid_out_as(const at::Tensor& parameter, const at::Tensor& tensor) {
  if (tensor.strides() == parameter.strides()) return tensor;
  return at::empty_like(parameter, tensor.options(), at::MemoryFormat::Preserve).copy_(tensor);
}

}  // namespace lockstep::detail
