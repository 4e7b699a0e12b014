#include <lockstep/module_state.h>

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr std::string_view kDdpPrefix = "module.";
constexpr size_t kMaxListed = 30;

/// Calls visit(name, tensor) in the order of Python's state_dict: of each module first its parameters, then its
/// buffers, then its children.
template <class Visit>
void visit_state(const torch::nn::Module& module, const std::string& prefix, const Visit& visit) {
  for (const auto& item : module.named_parameters(/*recurse=*/false)) visit(prefix + item.key(), item.value());
  for (const auto& item : module.named_buffers(/*recurse=*/false)) visit(prefix + item.key(), item.value());
  for (const auto& child : module.named_children()) visit_state(*child.value(), text(prefix, child.key(), "."), visit);
}

/// `name` is the name of the value; all values use one string, because many values may have one long prefix.
void flatten(const Value& value, std::string& name, std::map<std::string, at::Tensor>& tensors) {
  if (value.is(Value::Kind::kTensor)) {
    tensors[name] = value.tensor();
  } else if (value.is(Value::Kind::kDict) || value.is(Value::Kind::kObject)) {
    const size_t outer = name.size();
    for (const auto& [key, item] : value.items()) {
      if (!key.is(Value::Kind::kString)) continue;
      if (outer > 0) name += '.';
      name += key.as_string();
      flatten(item, name, tensors);
      name.resize(outer);
    }
  }
}

void strip_ddp_prefix(std::map<std::string, at::Tensor>& saved, const std::map<std::string, at::Tensor>& own) {
  const auto has_prefix = [](const auto& item) { return item.first.starts_with(kDdpPrefix); };
  if (saved.empty() || !std::all_of(saved.begin(), saved.end(), has_prefix)) return;
  if (std::any_of(own.begin(), own.end(), has_prefix)) return;
  std::map<std::string, at::Tensor> stripped;
  for (auto& [name, tensor] : saved) stripped.emplace(name.substr(kDdpPrefix.size()), std::move(tensor));
  saved = std::move(stripped);
}

std::string listed(const std::vector<std::string>& names) {
  auto some = names;
  if (some.size() > kMaxListed) {
    some.resize(kMaxListed);
    some.push_back(text(names.size() - kMaxListed, " more"));
  }
  return enumerate(some);
}

/// Returns a hint about the key: a checkpoint often holds the model's dict as one of several entries.
std::string hint_about(const Value& dict, const IncompatibleKeys& keys, size_t saved) {
  if (keys.unexpected.size() < saved) return "";
  for (const char* key : {"model", "state_dict", "model_state_dict"})
    if (const auto* inner = dict.find(key); inner && inner->is(Value::Kind::kDict))
      return text("; the dict has an entry '", key, "': pass value.at(\"", key, "\")");
  return "; build the model that was saved, or pass {.strict = false}";
}

}  // namespace

Value state_dict(const torch::nn::Module& module) {
  auto dict = Value::dict();
  visit_state(module, "", [&](const std::string& name, const at::Tensor& tensor) {
    dict.items().emplace_back(name, tensor.detach());
  });
  return dict;
}

std::map<std::string, at::Tensor> named_tensors(const Value& dict) {
  std::map<std::string, at::Tensor> tensors;
  std::string name;
  flatten(dict, name, tensors);
  return tensors;
}

IncompatibleKeys load_state_dict(torch::nn::Module& module, const Value& dict, const LoadStateDictOptions& options) {
  std::map<std::string, at::Tensor> own;
  IncompatibleKeys keys;
  std::vector<std::string> sizes;
  if (!dict.is(Value::Kind::kDict) && !dict.is(Value::Kind::kObject))
    throw UsageError(text("load_state_dict: expected a dict of tensors, got ", dict.to_string(80)));
  auto saved = named_tensors(dict);
  visit_state(module, "", [&](const std::string& name, const at::Tensor& tensor) { own.emplace(name, tensor); });
  strip_ddp_prefix(saved, own);

  for (const auto& [name, tensor] : own) {
    const auto found = saved.find(name);
    if (found == saved.end())
      keys.missing.push_back(name);
    else if (found->second.sizes() != tensor.sizes())
      sizes.push_back(text(name, " is ", found->second.sizes(), ", expected ", tensor.sizes()));
  }
  for (const auto& [name, tensor] : saved)
    if (!own.count(name)) keys.unexpected.push_back(name);

  std::string wrong;
  if (options.strict && !keys.missing.empty()) wrong += "; missing: " + listed(keys.missing);
  if (options.strict && !keys.unexpected.empty()) wrong += "; unexpected: " + listed(keys.unexpected);
  if (!sizes.empty()) wrong += "; wrong sizes: " + listed(sizes);
  if (!wrong.empty())
    throw UsageError(
        text("load_state_dict: the dict does not fit the module", wrong, hint_about(dict, keys, saved.size())));

  const c10::NoGradGuard no_grad;
  for (auto& [name, tensor] : own)
    if (const auto found = saved.find(name); found != saved.end()) tensor.copy_(found->second);
  return keys;
}

void StateTraits<at::Tensor>::load(at::Tensor& tensor, const Value& value) {
  const auto& saved = value.tensor();
  if (saved.sizes() != tensor.sizes())
    throw UsageError(text("the saved tensor is ", saved.sizes(), ", expected ", tensor.sizes()));
  const c10::NoGradGuard no_grad;
  tensor.copy_(saved);
}

}  // namespace lockstep
