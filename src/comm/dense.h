#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

namespace lockstep::detail {

/// Contiguous stand-ins for the user's tensors, as backends want them: the tensors themselves or their memory where
/// that is contiguous, else a copy. Empty tensors become undefined ones. Recorded by no autograd. They may borrow the
/// user's tensor, which must outlive them.
using DenseTensor = c10::MaybeOwned<at::Tensor>;

/// For reading.
DenseTensor dense_input(const at::Tensor& tensor);

/// For writing, contents undefined where `tensor` is not contiguous: store() brings the result home.
DenseTensor dense_output(const at::Tensor& tensor);

/// Copies `dense` into `tensor` unless they share memory.
void store(const at::Tensor& tensor, const at::Tensor& dense);

std::vector<at::Tensor> dense_inputs(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> dense_outputs(const std::vector<at::Tensor>& tensors);
void store(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& dense);

}  // namespace lockstep::detail
