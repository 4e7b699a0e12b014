#include <lockstep/model_adapters.h>

#include <set>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/jit/ir/graph_node_list.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/graph_iterator.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace detail {
namespace {

void check_adopted(const char* kind, const std::string& name, const at::Tensor& tensor, bool is_taken) {
  if (name.empty()) throw UsageError(text("a ", kind, " has an empty name; give each its own"));
  if (!tensor.defined()) throw UsageError(text(kind, " '", name, "' is an undefined tensor; pass a tensor with data"));
  if (is_taken) throw UsageError(text("the name '", name, "' occurs twice; give each tensor its own"));
}

/// Returns the child of that name, which is added if it does not exist.
torch::nn::Module& child_named(torch::nn::Module& parent, const std::string& name) {
  const auto children = parent.named_children();
  if (const auto* child = children.find(name)) return **child;
  return *parent.register_module(name, std::make_shared<torch::nn::Module>(name));
}

}  // namespace

// Module::register_parameter() and register_buffer() refuse names with dots, which tensors of nested modules have.
// Parameters are inserted under their whole names, which keeps their order; buffers are registered in nested modules.
AdoptedTensors::AdoptedTensors(std::string name, const NamedTensors& parameters, const NamedTensors& buffers)
    : torch::nn::Module(std::move(name)) {
  for (const auto& [key, tensor] : parameters) {
    check_adopted("parameter", key, tensor, parameters_.contains(key));
    if (!tensor.is_leaf())
      throw UsageError(text("parameter '", key, "' was computed from other tensors, so it gets no gradient; pass ",
                            "tensor.detach().requires_grad_()"));
    parameters_.insert(key, tensor);
  }
  for (const auto& [key, tensor] : buffers) {
    check_adopted("buffer", key, tensor, parameters_.contains(key) || named_buffers().contains(key));
    torch::nn::Module* owner = this;
    size_t begin = 0;
    for (size_t dot; (dot = key.find('.', begin)) != std::string::npos; begin = dot + 1)
      owner = &child_named(*owner, key.substr(begin, dot - begin));
    owner->register_buffer(key.substr(begin), tensor);
  }
}

bool AdoptedTensors::normalizes_batches() const {
  for (const auto& buffer : named_buffers())
    if (buffer.key() == "running_mean" || buffer.key().ends_with(".running_mean")) return true;
  return false;
}

c10::IValue with_each_tensor(c10::IValue value, const std::function<void(at::Tensor&)>& function) {
  if (value.isTensor()) {
    auto tensor = std::move(value).toTensor();
    if (tensor.defined()) function(tensor);
    return tensor;
  }
  // New containers: copies of an IValue share their containers.
  if (value.isTuple()) {
    std::vector<c10::IValue> items;
    for (const auto& item : value.toTupleRef().elements()) items.push_back(with_each_tensor(item, function));
    return c10::ivalue::Tuple::createNamed(std::move(items), value.toTupleRef().type());
  }
  if (value.isList()) {
    auto list = value.toList().copy();
    for (size_t i = 0; i < list.size(); ++i) list.set(i, with_each_tensor(list.get(i), function));
    return list;
  }
  if (value.isGenericDict()) {
    auto dict = value.toGenericDict().copy();
    for (const auto& item : dict) item.setValue(with_each_tensor(item.value(), function));
    return dict;
  }
  return value;
}

}  // namespace detail

namespace {

NamedTensors named_tensors(const auto& attributes, bool parameters) {
  NamedTensors result;
  for (const auto& attribute : attributes)
    if (attribute.is_parameter == parameters) result.emplace_back(attribute.name, attribute.tensor);
  return result;
}

/// Returns the names of the attributes to which the module's forward assigns.
std::set<std::string> assigned_names(const torch::jit::Module& module) {
  std::set<std::string> names;
  const auto forward = module.find_method("forward");
  if (!forward) return names;
  auto graph = forward->graph()->copy();
  torch::jit::Inline(*graph);
  torch::jit::DepthFirstGraphNodeIterator nodes(graph);
  while (const auto* node = nodes.next())
    if (node->kind() == c10::prim::SetAttr) names.insert(node->s(c10::attr::name));
  return names;
}

}  // namespace

std::vector<ScriptModule::Attribute> ScriptModule::attributes_of(const torch::jit::Module& module) {
  std::vector<Attribute> attributes;
  const auto assigned = assigned_names(module);
  for (const auto& item : module.named_modules()) {
    const auto object = item.value._ivalue();
    const auto type = item.value.type();
    for (size_t slot = 0; slot < type->numAttributes(); ++slot) {
      const auto& value = object->getSlot(slot);
      if (!value.isTensor() || !value.toTensor().defined()) continue;
      if (!type->is_parameter(slot) && !type->is_buffer(slot)) continue;
      const auto& name = type->getAttributeName(slot);
      const bool is_parameter = type->is_parameter(slot);
      attributes.push_back({item.name.empty() ? name : item.name + '.' + name, object, slot, value.toTensor(),
                            is_parameter, !is_parameter && assigned.count(name) > 0});
    }
  }
  return attributes;
}

ScriptModule::ScriptModule(torch::jit::Module module) : ScriptModule(module, attributes_of(module)) {}

ScriptModule::ScriptModule(torch::jit::Module module, std::vector<Attribute> attributes)
    : AdoptedTensors(module.type()->name()->name(), named_tensors(attributes, true), named_tensors(attributes, false)),
      module_(std::move(module)),
      attributes_(std::move(attributes)) {
  Module::train(module_.is_training());
}

void ScriptModule::train(bool on) {
  module_.train(on);
  Module::train(on);
}

// The script works on copies of buffers to which it assigns: the graph may need the old value, into which the new one
// is written afterwards.
c10::IValue ScriptModule::run(std::vector<c10::IValue> inputs) {
  keep_tensors();
  for (const auto& attribute : attributes_)
    if (attribute.is_assigned) attribute.owner->setSlot(attribute.slot, attribute.tensor.detach().clone());
  try {
    auto result = module_.forward(std::move(inputs));
    keep_tensors();
    return result;
  } catch (...) {
    for (const auto& attribute : attributes_)
      if (attribute.is_assigned) attribute.owner->setSlot(attribute.slot, attribute.tensor);
    throw;
  }
}

void ScriptModule::keep_tensors() {
  for (const auto& attribute : attributes_) {
    const auto& now = attribute.owner->getSlot(attribute.slot);
    if (now.isTensor() && now.toTensor().is_same(attribute.tensor)) continue;
    if (attribute.is_parameter)
      throw UsageError(text("parameter '", attribute.name, "' of the script was replaced after it was adapted; change ",
                            "its values in place, or adapt and wrap the script again"));
    if (!now.isTensor() || !now.toTensor().defined() || now.toTensor().sizes() != attribute.tensor.sizes())
      throw UsageError(text("buffer '", attribute.name, "' of the script was ", attribute.tensor.sizes(), " and is ",
                            now.isTensor() && now.toTensor().defined() ? text(now.toTensor().sizes()) : "not a tensor",
                            " now; keep the sizes of buffers"));
    const c10::NoGradGuard no_grad;
    attribute.tensor.copy_(now.toTensor());
    attribute.owner->setSlot(attribute.slot, attribute.tensor);
  }
}

}  // namespace lockstep
