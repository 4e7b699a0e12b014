#include <lockstep/data_parallel.h>

#include <algorithm>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "parallel/data_parallel/module_replicas.h"

namespace lockstep {
namespace {

/// Copies asynchronously only between GPUs: copies from or to host memory block, so that the memory is valid
/// afterwards.
at::Tensor moved(const at::Tensor& tensor, c10::Device device) {
  return tensor.to(device, /*non_blocking=*/!tensor.is_cpu() && !device.is_cpu());
}

}  // namespace

DataParallelBase::DataParallelBase(std::shared_ptr<torch::nn::Module> module, const DataParallelOptions& options) {
  if (!module) throw UsageError("DataParallel: the module is empty; pass a constructed module");
  replicas_ = std::make_unique<detail::ModuleReplicas>(std::move(module), options);
}

DataParallelBase::~DataParallelBase() = default;

const std::vector<c10::Device>& DataParallelBase::devices() const {
  return replicas_->devices();
}

std::vector<at::Tensor> DataParallelBase::parameters() const {
  return replicas_->module().parameters();
}

void DataParallelBase::train(bool on) {
  replicas_->module().train(on);
}

void DataParallelBase::eval() {
  train(false);
}

void DataParallelBase::replicate() {
  replicas_->replicate();
}

size_t DataParallelBase::count_parts(const std::vector<at::Tensor>& inputs) const {
  const auto dim = replicas_->dim();
  const at::Tensor* first = nullptr;
  for (const auto& input : inputs) {
    if (input.dim() == 0) continue;
    if (input.dim() <= dim)
      throw UsageError(text("DataParallel: an input of shape ", input.sizes(), " cannot be split along dimension ", dim,
                            "; set option dim to a dimension that every input has"));
    if (!first) first = &input;
    if (input.size(dim) != first->size(dim))
      throw UsageError(text("DataParallel: inputs of shapes ", first->sizes(), " and ", input.sizes(),
                            " differ along dimension ", dim, "; pass inputs of the same batch"));
  }
  if (!first) return 1;
  return std::max<size_t>(1, std::min(devices().size(), static_cast<size_t>(first->size(dim))));
}

at::Tensor DataParallelBase::part(const at::Tensor& input, size_t index, size_t parts) const {
  const auto device = devices()[index];
  if (input.dim() == 0 || parts == 1) return moved(input, device);
  // If the rows do not divide evenly, the first parts have one row more.
  const auto size = input.size(replicas_->dim());
  const auto [least, rest] = std::div(size, static_cast<int64_t>(parts));
  const auto place = static_cast<int64_t>(index);
  const auto begin = place * least + std::min(place, rest);
  return moved(input.narrow(replicas_->dim(), begin, least + (place < rest)), device);
}

void DataParallelBase::run(size_t parts, const std::function<void(size_t, torch::nn::Module&)>& body) {
  replicas_->run(parts, body);
}

void DataParallelBase::check_counts(const std::vector<std::vector<at::Tensor>>& tensors) const {
  for (size_t index = 1; index < tensors.size(); ++index)
    if (tensors[index].size() != tensors[0].size())
      throw UsageError(text("DataParallel: replica ", index, " returned ", tensors[index].size(),
                            " tensors, but replica 0 returned ", tensors[0].size(),
                            "; return the same number for each part of a batch"));
}

at::Tensor DataParallelBase::gather(const std::vector<at::Tensor>& parts) const {
  std::vector<at::Tensor> all;
  for (const auto& part : parts) {
    const auto moved_part = moved(part, replicas_->output_device());
    all.push_back(part.dim() == 0 ? moved_part.unsqueeze(0) : moved_part);
  }
  return at::cat(all, parts.front().dim() == 0 ? 0 : replicas_->dim());
}

}  // namespace lockstep
