#include "parallel/ddp/wrapped_module.h"

#include <algorithm>
#include <set>

#include <ATen/ATen.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "parallel/ddp/sparse_gradients.h"

namespace lockstep {
namespace {

/// Accesses a module's parameters without copying them and without building names.
struct Peek : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& parameters(const torch::nn::Module& module) {
    return module.*(&Peek::parameters_);
  }
};

void list_tensors(const torch::nn::Module& module, std::vector<const c10::TensorImpl*>& tensors) {
  for (const auto& item : Peek::parameters(module)) tensors.push_back(item.value().unsafeGetTensorImpl());
  for (const auto& buffer : module.buffers(/*recurse=*/false)) tensors.push_back(buffer.unsafeGetTensorImpl());
  for (const auto& child : module.children()) list_tensors(*child, tensors);
}

template <class Items>
std::vector<NamedParameter> once_each(const Items& items, const std::vector<std::string>& ignored) {
  std::vector<NamedParameter> result;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : items)
    if (item.value().defined() && std::find(ignored.begin(), ignored.end(), item.key()) == ignored.end() &&
        seen.insert(item.value().unsafeGetTensorImpl()).second)
      result.push_back({item.key(), item.value()});
  return result;
}

void check_names(const torch::nn::Module& module, const char* option, const std::vector<std::string>& names) {
  for (const auto& name : names)
    if (!module.named_parameters().contains(name) && !module.named_buffers().contains(name))
      throw UsageError(text("DistributedDataParallel: option ", option, " names '", name, "', but ", module.name(),
                            " has no such parameter or buffer; use a name from named_parameters() or named_buffers()"));
}

}  // namespace

WrappedModule::Form::Form(const at::Tensor& tensor)
    : sizes(tensor.sizes().vec()), dtype(tensor.scalar_type()), device(tensor.device()) {}

bool WrappedModule::Form::matches(const at::Tensor& tensor) const {
  return tensor.sizes() == at::IntArrayRef(sizes) && tensor.scalar_type() == dtype && tensor.device() == device;
}

std::string WrappedModule::Form::describe() const {
  return text(at::IntArrayRef(sizes), ' ', dtype, " on ", device);
}

WrappedModule::WrappedModule(std::shared_ptr<torch::nn::Module> module, const std::vector<std::string>& ignored)
    : module_(std::move(module)),
      parameters_(once_each(module_->named_parameters(), ignored)),
      buffers_(once_each(module_->named_buffers(), ignored)) {
  check_names(*module_, "ignore", ignored);
  for (const auto& [name, tensor] : parameters_) {
    as_wrapped_.emplace_back(tensor);
    requires_grad_.push_back(tensor.requires_grad());
  }
  list_tensors(*module_, registered_);
}

std::vector<NamedParameter> WrappedModule::trained() const {
  std::vector<NamedParameter> result;
  for (const auto& item : parameters_)
    if (item.tensor.requires_grad()) result.push_back(item);
  return result;
}

std::vector<std::string> WrappedModule::sparse_parameters(const DistributedDataParallelOptions& options) const {
  check_names(*module_, "sparse_parameters", options.sparse_parameters);
  if (options.densify_sparse_gradients) return {};
  auto names = options.sparse_parameters;
  for (const auto& [name, tensor] : parameters_)
    if (tensor.dim() == 0 && std::find(names.begin(), names.end(), name) != names.end())
      throw UsageError(text("DistributedDataParallel: option sparse_parameters names '", name,
                            "', which has no dimension and so no rows; leave it out"));
  const auto weights = sparse_weights_of(*module_);
  for (const auto& [name, tensor] : parameters_)
    if (std::find(weights.begin(), weights.end(), tensor.unsafeGetTensorImpl()) != weights.end()) names.push_back(name);
  return names;
}

std::vector<NamedParameter> WrappedModule::all_parameters() const {
  return once_each(module_->named_parameters(), {});
}

std::string WrappedModule::describe_change() const {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, tensor] = parameters_[i];
    if (tensor.requires_grad() && !requires_grad_[i])
      return text("parameter '", name,
                  "' was frozen when the model was wrapped and is trained now (to train it later, freeze it after "
                  "wrapping)");
    if (const auto& then = as_wrapped_[i]; !then.matches(tensor))
      return text("parameter '", name, "' was ", then.describe(), " when the model was wrapped and is ",
                  Form(tensor).describe(), " now");
  }
  std::vector<const c10::TensorImpl*> registered;
  registered.reserve(registered_.size());
  list_tensors(*module_, registered);
  if (registered == registered_) return {};
  const auto is_new = [&](const at::Tensor& tensor) {
    return tensor.defined() &&
           std::find(registered_.begin(), registered_.end(), tensor.unsafeGetTensorImpl()) == registered_.end();
  };
  for (const auto& item : module_->named_parameters())
    if (is_new(item.value()))
      return text("parameter '", item.key(), "' was added or replaced after the model was wrapped");
  for (const auto& item : module_->named_buffers())
    if (is_new(item.value()))
      return text("buffer '", item.key(), "' was added or replaced after the model was wrapped");
  return "a parameter or buffer was removed after the model was wrapped";
}

}  // namespace lockstep
