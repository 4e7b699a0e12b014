#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/MaybeOwned.h>

namespace lockstep::detail {

/// A contiguous version of a user's tensor, as backends require it: the tensor itself or an alias if its memory holds
/// its values one after the other, else a copy. Empty tensors become undefined. Autograd does not record it. It may
/// borrow the user's tensor, which must outlive it.
///
/// Two rules hold for every call that moves tensors:
/// - Where memory is read or written as bytes, conj and neg are resolved first: see is_lazy().
/// - A call that writes a tensor changes the tensor's version when it is made or submitted: see bump_version().
using DenseTensor = c10::MaybeOwned<at::Tensor>;

/// For reading.
DenseTensor dense_input(const at::Tensor& tensor);

/// For writing. If the result is a copy, its contents are undefined; store() copies them to `tensor`.
DenseTensor dense_output(const at::Tensor& tensor);

/// Copies `dense` into `tensor` unless they share memory. Does not change the tensor's version.
void store(const at::Tensor& tensor, const at::Tensor& dense);

std::vector<at::Tensor> dense_inputs(const std::vector<at::Tensor>& tensors);
std::vector<at::Tensor> dense_outputs(const std::vector<at::Tensor>& tensors);
void store(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& dense);

/// Whether the values of a tensor are not those in its memory: conj() and imag() of a conjugate only set a bit.
inline bool is_lazy(const at::Tensor& tensor) {
  return tensor.is_conj() || tensor.is_neg();
}

/// Marks the tensor as written, for autograd and for optimizers with master weights, as an in-place operator of
/// LibTorch does. Tensors of inference mode have no version.
inline void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}
inline void bump_versions(const std::vector<at::Tensor>& tensors) {
  for (const auto& tensor : tensors) bump_version(tensor);
}

/// Describes why a parameter or buffer cannot be written, for an error message after its name; empty if it can.
std::string why_not_writable(const at::Tensor& tensor);

}  // namespace lockstep::detail
