#include "comm/dense.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <c10/core/GradMode.h>

namespace lockstep::detail {
namespace {

// The fast path for most tensors: each call through LibTorch's dispatcher takes longer than a small collective.
bool is_fit(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.requires_grad() && !is_lazy(tensor);
}

template <class Convert>
std::vector<at::Tensor> each(const std::vector<at::Tensor>& tensors, Convert convert) {
  std::vector<at::Tensor> result;
  result.reserve(tensors.size());
  for (const auto& tensor : tensors) result.push_back(*convert(tensor));
  return result;
}

}  // namespace

DenseTensor dense_input(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return DenseTensor();
  if (is_fit(tensor)) return DenseTensor::borrowed(tensor);
  c10::NoGradGuard no_grad;
  return DenseTensor::owned(tensor.detach().resolve_conj().resolve_neg().contiguous());
}

DenseTensor dense_output(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return DenseTensor();
  if (is_fit(tensor)) return DenseTensor::borrowed(tensor);
  c10::NoGradGuard no_grad;
  if (tensor.is_contiguous() && !is_lazy(tensor)) return DenseTensor::owned(tensor.detach());
  return DenseTensor::owned(at::empty({tensor.numel()}, tensor.options().requires_grad(false)));
}

void store(const at::Tensor& tensor, const at::Tensor& dense) {
  if (!dense.defined() || dense.is_same(tensor) || tensor.data_ptr() == dense.data_ptr()) return;
  c10::NoGradGuard no_grad;
  tensor.variable_data().copy_(dense.view(tensor.sizes()));
}

std::vector<at::Tensor> dense_inputs(const std::vector<at::Tensor>& tensors) {
  return each(tensors, dense_input);
}

std::vector<at::Tensor> dense_outputs(const std::vector<at::Tensor>& tensors) {
  return each(tensors, dense_output);
}

void store(const std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& dense) {
  for (size_t i = 0; i < tensors.size(); ++i) store(tensors[i], dense[i]);
}

std::string why_not_writable(const at::Tensor& tensor) {
  if (tensor.is_inference())
    return "was created under InferenceMode, so it cannot be trained or received; build the model outside of "
           "c10::InferenceMode";
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    return "has elements that share memory (an expanded tensor?); register a copy of it, as .contiguous() makes it";
  return {};
}

}  // namespace lockstep::detail
