#include "compiled/description.h"

#include <algorithm>
#include <map>
#include <optional>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>

#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep::detail {
namespace {

constexpr const char* kFormat = "lockstep compiled model";
constexpr int64_t kFormatVersion = 1;

size_t to_index(const Value& value) {
  const auto index = value.as_int();
  if (index < 0) throw UsageError(text("expected an index, got ", index));
  return static_cast<size_t>(index);
}

template <class Convert>
auto to_vector(const Value& list, const Convert& convert) {
  std::vector<std::decay_t<decltype(convert(list))>> result;
  for (const auto& element : list.elements()) result.push_back(convert(element));
  return result;
}

std::vector<size_t> to_indices(const Value& list) {
  return to_vector(list, to_index);
}

std::vector<int64_t> to_integers(const Value& list) {
  return to_vector(list, [](const Value& value) { return value.as_int(); });
}

std::vector<std::string> to_strings(const Value& list) {
  return to_vector(list, [](const Value& value) { return value.as_string(); });
}

c10::ScalarType to_dtype(const Value& name) {
  const auto dtype = dtype_named(name.as_string());
  if (!dtype) throw UsageError(text("this LibTorch has no dtype ", name.as_string()));
  return *dtype;
}

Structure to_structure(const Value& value) {
  Structure structure;
  if (value.is_none()) return structure;
  if (value.is(Value::Kind::kInt)) {
    structure.kind = Structure::Kind::kTensor;
    structure.tensor = to_index(value);
    return structure;
  }
  const auto& parts = value.elements();
  const auto& kind = value.at(0).as_string();
  structure.kind = kind == "dict"    ? Structure::Kind::kDict
                   : kind == "tuple" ? Structure::Kind::kTuple
                                     : Structure::Kind::kList;
  for (size_t i = 1; i < parts.size(); ++i) {
    if (structure.kind == Structure::Kind::kDict)
      structure.elements.emplace_back(parts[i].at(0).as_string(), to_structure(parts[i].at(1)));
    else
      structure.elements.emplace_back("", to_structure(parts[i]));
  }
  return structure;
}

ForwardGraph to_forward_graph(const Value& value) {
  return {value.at("name").as_string(), to_index(value.at("outputs")), to_structure(value.at("structure")),
          to_indices(value.at("written_buffers"))};
}

BackwardGraph to_backward_graph(const Value& value) {
  const auto to_saved = [](const Value& saved) {
    return SavedValue{saved.at(0).as_string() == "output", to_index(saved.at(1))};
  };
  const auto to_tangent = [](const Value& tangent) {
    return Tangent{to_index(tangent.at("output")), to_integers(tangent.at("shape")), to_integers(tangent.at("stride")),
                   to_dtype(tangent.at("dtype"))};
  };
  return {value.at("name").as_string(), to_vector(value.at("saved"), to_saved),
          to_vector(value.at("tangents"), to_tangent), to_indices(value.at("gradients"))};
}

/// The tensors of a model by name, from the state_dict and the constants of the file.
class TensorsOfModel {
 public:
  explicit TensorsOfModel(const Value& file) : aliases_(file.at("aliases")) {
    for (const auto& [name, tensor] : file.at("constants").items()) tensors_.emplace(name.as_string(), tensor.tensor());
    for (const auto& [name, tensor] : file.at("state_dict").items())
      tensors_.emplace(name.as_string(), tensor.tensor());
  }

  /// Returns the tensor with this name; all names of a tied tensor lead to the same one.
  const at::Tensor& find(const std::string& name) const {
    const auto* first = aliases_.find(name);
    const auto found = tensors_.find(first ? first->as_string() : name);
    if (found == tensors_.end()) throw UsageError(text("there is no tensor '", name, "'"));
    return found->second;
  }

 private:
  const Value& aliases_;
  std::map<std::string, at::Tensor> tensors_;
};

void read_tensors(const Value& file, CompiledDescription& model) {
  const TensorsOfModel tensors(file);
  const auto parameters = to_strings(file.at("parameters"));
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& tensor = tensors.find(parameters[i]);
    const bool is_trained = file.at("requires_grad").at(i).as_bool();
    tensor.requires_grad_(is_trained);
    model.parameters.push_back({.name = parameters[i], .tensor = tensor, .requires_grad = is_trained});
  }
  for (const auto& name : to_strings(file.at("buffers")))
    model.buffers.push_back(
        {.name = name, .tensor = tensors.find(name), .is_persistent = !file.at("constants").contains(name)});
  for (const auto& [key, value] : file.at("state_dict").items()) {
    const auto& tensor = tensors.find(key.as_string());
    const bool is_parameter =
        std::any_of(model.parameters.begin(), model.parameters.end(),
                    [&](const DescribedTensor& parameter) { return parameter.tensor.is_same(tensor); });
    (is_parameter ? model.named_parameters : model.named_buffers).emplace_back(key.as_string(), tensor);
  }
}

CompiledDescription read(const Value& file) {
  CompiledDescription model;
  model.model = file.at("model").as_string();
  model.torch = file.at("torch").as_string();
  model.device = c10::Device(file.at("device").as_string()).type();
  model.architecture = file.at("architecture").as_string();
  if (const auto& capability = file.at("compute_capability"); !capability.is_none())
    model.compute_capability = capability.as_string();
  model.instructions = to_strings(file.at("instruction_set"));
  model.matmul_precision = file.at("float32_matmul_precision").as_string();
  model.has_loss = file.at("has_loss").as_bool();
  model.normalizes_batches = file.at("has_batch_norm").as_bool();
  read_tensors(file, model);
  const auto to_input = [](const Value& input) {
    return CompiledInput{to_integers(input.at("shape")), to_dtype(input.at("dtype")),
                         input.at("requires_grad").as_bool()};
  };
  for (const auto& shape : file.at("shapes").elements()) {
    model.inputs.push_back(to_vector(shape.at("inputs"), to_input));
    model.sizes.push_back({to_forward_graph(shape.at("forward")), to_backward_graph(shape.at("backward")),
                           to_forward_graph(shape.at("evaluation")), to_index(shape.at("evaluation").at("inputs"))});
  }
  return model;
}

}  // namespace

c10::IValue Structure::compose(const std::vector<at::Tensor>& tensors) const {
  switch (kind) {
    case Kind::kNone:
      return {};
    case Kind::kTensor:
      return tensors.at(tensor);
    case Kind::kTuple: {
      std::vector<c10::IValue> values;
      for (const auto& [name, element] : elements) values.push_back(element.compose(tensors));
      return c10::ivalue::Tuple::create(std::move(values));
    }
    case Kind::kList: {
      c10::impl::GenericList list(c10::AnyType::get());
      for (const auto& [name, element] : elements) list.push_back(element.compose(tensors));
      return list;
    }
    case Kind::kDict: {
      c10::impl::GenericDict dict(c10::StringType::get(), c10::AnyType::get());
      for (const auto& [name, element] : elements) dict.insert(name, element.compose(tensors));
      return dict;
    }
  }
  return {};
}

CompiledDescription read_description(const std::string& path, const Value& file) {
  const auto* format = file.is(Value::Kind::kDict) ? file.find("format") : nullptr;
  if (!format || !(*format == Value(kFormat)))
    throw CheckpointError(text(path, " is not a compiled model; lockstep compile makes one"));
  try {
    if (const auto version = file.at("format_version").as_int(); version != kFormatVersion)
      throw UsageError(text("its format has version ", version, ", and this lockstep reads version ", kFormatVersion,
                            "; compile the model with this lockstep"));
    return read(file);
  } catch (const UsageError& error) {
    throw CheckpointError(text(path, ": the description of the compiled model is invalid: ", error.what()));
  }
}

}  // namespace lockstep::detail
