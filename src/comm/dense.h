#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

namespace lockstep::detail {

/// A contiguous version of a user's tensor, as backends require it: the tensor itself or an alias if it is contiguous,
/// else a copy. Empty tensors become undefined. Autograd does not record it. It may borrow the user's tensor, which
/// must outlive it.
using DenseTensor = c10::MaybeOwned<at::Tensor>;

/// For reading.
DenseTensor dense_input(const at::Tensor& tensor);

/// For writing. The contents are undefined if `tensor` is not contiguous; store() copies the result to `tensor`.
DenseTensor dense_output(const at::Tensor& tensor);

/// Copies `dense` into `tensor` unless they share memory.
void store(const at::Tensor& tensor, const at::Tensor& dense);

std::vector<at::Tensor> dense_inputs(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> dense_outputs(const std::vector<at::Tensor>& tensors);
void store(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& dense);

}  // namespace lockstep::detail
