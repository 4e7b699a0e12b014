#pragma once

#include <ATen/ATen.h>

namespace lockstep::detail {

/// The elements of a dense tensor as they follow each other in memory.
inline at::Tensor as_row(const at::Tensor& dense) {
  return dense.as_strided({dense.numel()}, {1});
}

/// The tensor as it is, if it lies in memory as the parameter does; else a copy that does.
inline at::Tensor laid_out_as(const at::Tensor& parameter, const at::Tensor& tensor) {
  if (tensor.strides() == parameter.strides()) return tensor;
  return at::empty_like(parameter, tensor.options(), at::MemoryFormat::Preserve).copy_(tensor);
}

}  // namespace lockstep::detail
