#include <lockstep/collate.h>

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

std::string describe_sample(const at::Tensor& tensor) {
  if (!tensor.defined()) return "no tensor";
  return text("a tensor of shape ", tensor.sizes(), ", ", tensor.scalar_type(), ", on ", tensor.device());
}

bool are_alike(const at::Tensor& one, const at::Tensor& other) {
  if (!one.defined() || !other.defined()) return one.defined() == other.defined();
  return one.sizes() == other.sizes() && one.scalar_type() == other.scalar_type() && one.device() == other.device();
}

bool is_plain_memory(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         !tensor.requires_grad() && !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg();
}

// Equivalent to at::stack for contiguous CPU tensors, without one dispatch per tensor: five times as fast for small
// tensors.
at::Tensor stack_memory(const std::vector<at::Tensor>& tensors) {
  auto shape = tensors[0].sizes().vec();
  shape.insert(shape.begin(), static_cast<int64_t>(tensors.size()));
  auto stacked = at::empty(shape, tensors[0].options());
  const size_t bytes = tensors[0].nbytes();
  if (bytes == 0) return stacked;
  auto* next = static_cast<char*>(stacked.data_ptr());
  for (const auto& tensor : tensors) {
    std::memcpy(next, tensor.data_ptr(), bytes);
    next += bytes;
  }
  return stacked;
}

// Returns an undefined tensor if all are undefined: samples may have no target.
at::Tensor stack(const std::vector<at::Tensor>& tensors, const char* what) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!are_alike(tensors[i], tensors[0])) {
      throw UsageError(text("the samples cannot be stacked: ", what, " of sample ", i, " in the batch is ",
                            describe_sample(tensors[i]), ", but that of sample 0 is ", describe_sample(tensors[0]),
                            "; return tensors of one shape, dtype and device, or pass DataLoader a collate function"));
    }
  }
  if (!tensors.at(0).defined()) return {};
  return std::all_of(tensors.begin(), tensors.end(), is_plain_memory) ? stack_memory(tensors) : at::stack(tensors);
}

}  // namespace

at::Tensor Stack::operator()(std::vector<at::Tensor> samples) const {
  return stack(samples, "the tensor");
}

torch::data::Example<> Stack::operator()(std::vector<torch::data::Example<>> samples) const {
  std::vector<at::Tensor> data, targets;
  data.reserve(samples.size());
  targets.reserve(samples.size());
  for (auto& sample : samples) {
    data.push_back(std::move(sample.data));
    targets.push_back(std::move(sample.target));
  }
  return {stack(data, "the data"), stack(targets, "the target")};
}

torch::data::TensorExample Stack::operator()(std::vector<torch::data::TensorExample> samples) const {
  std::vector<at::Tensor> data;
  data.reserve(samples.size());
  for (auto& sample : samples) data.push_back(std::move(sample.data));
  return stack(data, "the data");
}

}  // namespace lockstep
