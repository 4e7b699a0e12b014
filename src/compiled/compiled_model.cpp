#include "compiled/compiled_model.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "comm/torch_version.h"
#include "compiled/compiled_backward.h"

namespace lockstep::detail {
namespace {

std::string describe(c10::ScalarType dtype, at::IntArrayRef sizes) {
  return text(python_name(dtype), " ", sizes);
}

/// "(float32 [32, 784], int64 [32])"
template <class Inputs, class Describe>
std::string describe_all(const Inputs& inputs, size_t count, const Describe& describe_one) {
  std::string result = "(";
  for (size_t i = 0; i < count; ++i) result += (i > 0 ? ", " : "") + describe_one(inputs[i]);
  return result + ")";
}

}  // namespace

CompiledModel::CompiledModel(std::string path, CompiledDescription description)
    : path_(std::move(path)),
      description_(std::make_shared<CompiledDescription>(std::move(description))),
      tensors_(description_->parameters),
      device_(description_->device),
      graphs_(description_->sizes.size()) {
  tensors_.insert(tensors_.end(), description_->buffers.begin(), description_->buffers.end());
  for (const auto& [name, tensor, requires_grad, is_persistent] : tensors_)
    forms_.push_back({tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()});
}

void CompiledModel::refuse(const std::string& why) const {
  throw UsageError(text("CompiledModule ", description_->model, ": ", why));
}

c10::IValue CompiledModel::run(std::vector<at::Tensor> inputs, bool is_training) {
  const auto device = check_tensors();
  const size_t number = find_sizes(inputs, is_training);
  check_inputs(inputs, description_->inputs[number], device, is_training);
  const auto& compiled = description_->sizes[number];
  const bool is_differentiated = is_training && at::GradMode::is_enabled();
  if (is_differentiated) check_frozen();
  if (device != std::exchange(device_, device)) graphs_.assign(graphs_.size(), {});

  const auto& graph = is_training ? compiled.forward : compiled.evaluation;
  auto& loaded = load(is_training ? graphs_[number].forward : graphs_[number].evaluation, graph.name, device);
  if (is_differentiated) load(graphs_[number].backward, compiled.backward.name, device);
  for (auto& input : inputs) input = input.resolve_conj().resolve_neg().contiguous();
  const auto arguments = arguments_with(inputs);
  auto results = loaded.run(arguments);
  if (is_differentiated) connect_backward(description_, number, arguments, results, graphs_[number].backward);
  write_buffers(graph, results);
  results.resize(graph.outputs);
  return graph.structure.compose(results);
}

std::vector<at::Tensor> CompiledModel::arguments_with(const std::vector<at::Tensor>& inputs) const {
  std::vector<at::Tensor> arguments;
  arguments.reserve(tensors_.size() + inputs.size());
  for (const auto& tensor : tensors_) arguments.push_back(tensor.tensor);
  arguments.insert(arguments.end(), inputs.begin(), inputs.end());
  return arguments;
}

void CompiledModel::write_buffers(const ForwardGraph& graph, const std::vector<at::Tensor>& results) const {
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < graph.written_buffers.size(); ++i)
    description_->buffers[graph.written_buffers[i]].tensor.copy_(results[graph.outputs + i]);
}

LoadedGraph& CompiledModel::load(std::shared_ptr<LoadedGraph>& graph, const std::string& name, c10::Device device) {
  if (!graph) graph = std::make_shared<LoadedGraph>(path_, name, device, description_->matmul_precision);
  return *graph;
}

/// Returns the device of all parameters and buffers. Buffers that are not in the state_dict follow the others.
c10::Device CompiledModel::check_tensors() {
  const auto device = tensors_.at(0).tensor.device();
  for (size_t i = 0; i < tensors_.size(); ++i) {
    auto& [name, tensor, requires_grad, is_persistent] = tensors_[i];
    const auto& form = forms_[i];
    if (!is_persistent && tensor.device() != device) tensor = tensor.to(device);
    if (tensor.device() != device)
      refuse(text("'", name, "' is on ", tensor.device(), ", but '", tensors_[0].name, "' is on ", device,
                  "; move the whole module"));
    if (tensor.scalar_type() != form.dtype || tensor.sizes() != at::IntArrayRef(form.sizes))
      refuse(text("'", name, "' is ", describe(tensor.scalar_type(), tensor.sizes()), ", but was compiled as ",
                  describe(form.dtype, form.sizes), "; convert the model in Python, and compile it again"));
    if (tensor.strides() != at::IntArrayRef(form.strides))
      refuse(text("'", name, "' has strides ", tensor.strides(), ", but was compiled with ",
                  at::IntArrayRef(form.strides), "; change the values of a tensor only in place"));
  }
  if (device.type() != description_->device)
    refuse(text("it is on ", device, ", but was compiled for ", c10::DeviceTypeName(description_->device, true),
                "; compile it for this device as well"));
  if (is_autocast_enabled(device.type()))
    refuse(
        "autocast is enabled, but has no effect on a compiled model, whose dtypes are fixed; compile it with "
        "--autocast, and call it outside of autocast");
  return device;
}

void CompiledModel::check_frozen() const {
  for (const auto& [name, tensor, requires_grad, is_persistent] : description_->parameters)
    if (tensor.requires_grad() != requires_grad)
      refuse(text("parameter '", name, "' was ", requires_grad ? "trained" : "frozen",
                  " when the model was compiled, and is ", requires_grad ? "frozen" : "trained",
                  " now; set requires_grad in Python, and compile the model again"));
}

size_t CompiledModel::number_of_inputs(size_t sizes, bool is_training) const {
  return is_training ? description_->inputs[sizes].size() : description_->sizes[sizes].evaluation_inputs;
}

std::string CompiledModel::list_sizes(bool is_training) const {
  std::vector<std::string> lines;
  for (size_t i = 0; i < description_->inputs.size(); ++i)
    lines.push_back(describe_all(description_->inputs[i], number_of_inputs(i, is_training),
                                 [](const CompiledInput& input) { return describe(input.dtype, input.sizes); }));
  return enumerate(lines);
}

size_t CompiledModel::find_sizes(const std::vector<at::Tensor>& inputs, bool is_training) const {
  for (const auto& input : inputs)
    if (!input.defined()) refuse("an input is an undefined tensor; pass a tensor with data");
  const auto is_compiled = [](const at::Tensor& input, const CompiledInput& compiled) {
    return input.layout() == at::kStrided && input.scalar_type() == compiled.dtype &&
           input.sizes() == at::IntArrayRef(compiled.sizes);
  };
  for (size_t i = 0; i < description_->inputs.size(); ++i)
    if (inputs.size() == number_of_inputs(i, is_training) &&
        std::equal(inputs.begin(), inputs.end(), description_->inputs[i].begin(), is_compiled))
      return i;
  const auto got = describe_all(inputs, inputs.size(),
                                [](const at::Tensor& input) { return describe(input.scalar_type(), input.sizes()); });
  refuse(text("in ", is_training ? "training" : "evaluation", " mode it was compiled for inputs ",
              list_sizes(is_training), ", got ", got,
              "; compile it for these as well: ", "make may return a list of inputs"));
}

void CompiledModel::check_inputs(const std::vector<at::Tensor>& inputs, const std::vector<CompiledInput>& compiled,
                                 c10::Device device, bool is_training) const {
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].device() != device)
      refuse(text("input ", i, " is on ", inputs[i].device(), ", and the model on ", device, "; move the input"));
    if (is_training && at::GradMode::is_enabled() && inputs[i].requires_grad() && !compiled[i].requires_grad)
      refuse(text("input ", i,
                  " requires a gradient, which the compiled model does not compute; detach it, or compile ",
                  "the model with an input that requires a gradient"));
  }
}

}  // namespace lockstep::detail
