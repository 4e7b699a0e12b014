// Options, and the states of optimizers of unknown classes, are accessible only through archives: state_dict() reads
// the archive that the optimizer writes. load_state_dict() builds an archive and lets the optimizer load it.

#include <lockstep/optimizer_state.h>

#include <algorithm>
#include <optional>
#include <set>
#include <sstream>
#include <typeinfo>

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <lockstep/error.h>
#include <lockstep/fused_optimizers.h>

#include "base/text.h"
#include "optim/master_weights.h"
#include "optim/optimizer_state.h"

namespace lockstep {
namespace {

using detail::OptimizerState;
using torch::optim::Optimizer;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using Values = OptimizerState::Values;

/// Reopens a written archive for reading, with its tensors on `device`.
InputArchive reopen(OutputArchive& written, c10::Device device) {
  std::stringstream bytes;
  written.save_to(bytes);
  InputArchive archive;
  archive.load_from(bytes, device);
  return archive;
}

OutputArchive new_archive() {
  return OutputArchive(std::make_shared<torch::jit::CompilationUnit>());
}

Values values_in(InputArchive& archive) {
  Values values;
  for (const auto& name : archive.keys()) archive.read(name, values[name]);
  return values;
}

void write(OutputArchive& archive, const Values& values) {
  for (const auto& [name, value] : values) archive.write(name, value);
}

InputArchive child(InputArchive& archive, const std::string& name) {
  InputArchive result;
  archive.read(name, result);
  return result;
}

int64_t read_count(InputArchive& archive, const std::string& name) {
  at::Tensor number;
  archive.read(name, number);
  return number.item<int64_t>();
}

Values options_of(const torch::optim::OptimizerOptions& options) {
  auto archive = new_archive();
  options.serialize(archive);
  auto written = reopen(archive, c10::kCPU);
  return values_in(written);
}

/// Python keeps the step count in a tensor, LibTorch in an integer.
constexpr const char* kStep = "step";
/// The float32 copy of a parameter. It is not in LibTorch's states: see MasterWeights.
constexpr const char* kMaster = "master_param";

c10::IValue as_python_has_it(const std::string& name, const c10::IValue& value) {
  if (name == kStep && value.isInt()) return at::scalar_tensor(static_cast<double>(value.toInt()), at::kFloat);
  return value;
}

/// Tensors of the result are on the CPU, those with floating-point numbers in `dtype`.
c10::IValue as_libtorch_has_it(const std::string& name, const c10::IValue& value, at::ScalarType dtype) {
  if (name == kStep && value.isTensor()) return static_cast<int64_t>(value.toTensor().item<double>());
  if (name == kStep && value.isDouble()) return static_cast<int64_t>(value.toDouble());
  if (!value.isTensor()) return value;
  const auto tensor = value.toTensor();
  return tensor.to(at::kCPU, tensor.is_floating_point() ? dtype : tensor.scalar_type());
}

/// Converts `value` to the type of the option's current value `now`.
c10::IValue as_option(const c10::IValue& value, const c10::IValue& now) {
  if (now.isDouble() && value.isInt()) return static_cast<double>(value.toInt());
  if (now.isDouble() && value.isTensor()) return value.toTensor().item<double>();
  if (!now.isTuple() || !value.isTuple()) return value;
  const auto &items = value.toTupleRef().elements(), &items_now = now.toTupleRef().elements();
  std::vector<c10::IValue> result;
  for (size_t i = 0; i < items.size(); ++i)
    result.push_back(i < items_now.size() ? as_option(items[i], items_now[i]) : items[i]);
  return c10::ivalue::Tuple::create(std::move(result));
}

// --- checks

std::string parameter_name(const OptimizerState::Group& group, size_t i) {
  if (i < group.names.size()) return text("parameter '", group.names[i], "'");
  return text("parameter ", group.parameters[i]);
}

const std::set<std::string> kOfParametersSizes = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer",
                                                  "sum",     "square_avg", "grad_avg",       kMaster};

/// Returns the values that every state of a stepped parameter must have; empty if the type of optimizer is unknown.
std::vector<std::string> needed_by(const Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const Adam*>(&optimizer) || dynamic_cast<const AdamW*>(&optimizer))
    return {kStep, "exp_avg", "exp_avg_sq"};
  if (dynamic_cast<const Adagrad*>(&optimizer)) return {kStep, "sum"};
  if (dynamic_cast<const RMSprop*>(&optimizer)) return {kStep, "square_avg"};
  if (dynamic_cast<const SGD*>(&optimizer)) return {"momentum_buffer"};
  return {};
}

/// Whether LibTorch has no state for these values. SGD without momentum has no momentum buffer; Python may save it as
/// None.
bool is_empty_state(const Values& values) {
  return std::all_of(values.begin(), values.end(),
                     [](const auto& item) { return item.second.isNone() || item.first == kMaster; });
}

void check_values(const OptimizerState::Group& group, size_t i, const Values& values, const at::Tensor& parameter,
                  const std::vector<std::string>& needed) {
  for (const auto& name : needed)
    if (const auto found = values.find(name); found == values.end() || found->second.isNone())
      throw UsageError(text("load_state_dict: the state of ", parameter_name(group, i), " has no '", name,
                            "': it belongs to another kind of optimizer; load it into the kind that saved it"));
  for (const auto& [name, value] : values)
    if (kOfParametersSizes.count(name) && value.isTensor() && value.toTensor().sizes() != parameter.sizes())
      throw UsageError(text("load_state_dict: '", name, "' of ", parameter_name(group, i), " has sizes ",
                            value.toTensor().sizes(), ", expected the parameter's sizes ", parameter.sizes(),
                            "; the state belongs to another model"));
}

/// Writes the state in the format that LibTorch's optimizers load.
OutputArchive archive_of(const Optimizer& optimizer, const OptimizerState& state) {
  auto archive = new_archive();
  const auto unit = archive.compilation_unit();
  OutputArchive states(unit), groups(unit);
  const bool has_masters = detail::masters_of(optimizer) != nullptr;
  groups.write("param_groups/size", at::scalar_tensor(static_cast<int64_t>(state.groups.size()), at::kLong));
  for (size_t g = 0; g < state.groups.size(); ++g) {
    const auto& group = state.groups[g];
    const auto& parameters = optimizer.param_groups()[g].params();
    OutputArchive one(unit), options(unit);
    one.write("params/size", at::scalar_tensor(static_cast<int64_t>(parameters.size()), at::kLong));
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto key = std::to_string(group.parameters[i] + 1);  // LibTorch may parse the key as a pointer: avoid null
      one.write(text("params/", i), c10::IValue(key));
      const auto found = state.parameters.find(group.parameters[i]);
      if (found == state.parameters.end() || is_empty_state(found->second)) continue;
      OutputArchive values(unit);
      const bool is_mastered = has_masters && detail::MasterWeights::is_for(parameters[i]);
      const auto dtype = is_mastered ? at::kFloat : parameters[i].scalar_type();
      for (const auto& [name, value] : found->second)
        if (!value.isNone() && name != kMaster) values.write(name, as_libtorch_has_it(name, value, dtype));
      states.write(key, values);
    }
    optimizer.param_groups()[g].options().serialize(options);
    one.write("options", options);
    groups.write(text("param_groups/", g), one);
  }
  archive.write("pytorch_version", c10::IValue("1.5.0"));
  archive.write("state", states);
  archive.write("param_groups", groups);
  return archive;
}

/// Returns a copy of `options` with the values of the state.
std::unique_ptr<torch::optim::OptimizerOptions> changed(const torch::optim::OptimizerOptions& options,
                                                        const Values& values) {
  auto all = options_of(options);
  for (auto& [name, value] : all)
    if (const auto found = values.find(name); found != values.end()) value = as_option(found->second, value);
  auto archive = new_archive();
  write(archive, all);
  auto written = reopen(archive, c10::kCPU);
  auto result = options.clone();
  result->serialize(written);
  return result;
}

/// Returns the device of the parameters, and so of their states.
c10::Device device_of_state(const Optimizer& optimizer) {
  std::optional<c10::Device> device;
  for (const auto& group : optimizer.param_groups())
    for (const auto& parameter : group.params()) {
      if (device && parameter.device() != *device)
        throw UsageError(text("load_state_dict: the optimizer has parameters on ", *device, " and on ",
                              parameter.device(), "; create one optimizer for each device"));
      device = parameter.device();
    }
  return device.value_or(c10::kCPU);
}

}  // namespace

namespace {

/// Adds the tensors that are defined.
void add_tensors(Values& values, std::initializer_list<std::pair<const char*, at::Tensor>> tensors) {
  for (const auto& [name, tensor] : tensors)
    if (tensor.defined()) values.emplace(name, tensor);
}

template <class State>
Values adam_values(const State& state) {
  Values values{{kStep, state.step()}};
  add_tensors(
      values,
      {{"exp_avg", state.exp_avg()}, {"exp_avg_sq", state.exp_avg_sq()}, {"max_exp_avg_sq", state.max_exp_avg_sq()}});
  return values;
}

/// Returns a parameter's state, with its own tensors; nothing if the type of state is unknown.
std::optional<Values> values_of(const torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;
  const auto& type = typeid(state);
  Values values;
  if (type == typeid(AdamParamState)) return adam_values(static_cast<const AdamParamState&>(state));
  if (type == typeid(AdamWParamState)) return adam_values(static_cast<const AdamWParamState&>(state));
  if (type == typeid(SGDParamState)) {
    add_tensors(values, {{"momentum_buffer", static_cast<const SGDParamState&>(state).momentum_buffer()}});
  } else if (type == typeid(AdagradParamState)) {
    const auto& adagrad = static_cast<const AdagradParamState&>(state);
    values = {{kStep, adagrad.step()}};
    add_tensors(values, {{"sum", adagrad.sum()}});
  } else if (type == typeid(RMSpropParamState)) {
    const auto& rmsprop = static_cast<const RMSpropParamState&>(state);
    values = {{kStep, rmsprop.step()}};
    add_tensors(values, {{"square_avg", rmsprop.square_avg()},
                         {"momentum_buffer", rmsprop.momentum_buffer()},
                         {"grad_avg", rmsprop.grad_avg()}});
  } else {
    return std::nullopt;
  }
  return values;
}

/// Reads the state from the archive that the optimizer writes: works for every class, but copies.
OptimizerState archived_state(const Optimizer& optimizer) {
  auto saved = new_archive();
  optimizer.save(saved);
  auto archive = reopen(saved, c10::kCPU);
  auto states = child(archive, "state");
  auto groups = child(archive, "param_groups");
  const auto keys = states.keys();
  const std::set<std::string> with_state(keys.begin(), keys.end());

  OptimizerState state;
  int64_t next = 0;
  const int64_t group_count = read_count(groups, "param_groups/size");
  for (int64_t g = 0; g < group_count; ++g) {
    auto saved_group = child(groups, text("param_groups/", g));
    auto options = child(saved_group, "options");
    auto& group = state.groups.emplace_back();
    group.options = values_in(options);
    const int64_t size = read_count(saved_group, "params/size");
    for (int64_t i = 0; i < size; ++i, ++next) {
      group.parameters.push_back(next);
      c10::IValue key;
      saved_group.read(text("params/", i), key);
      if (!with_state.count(key.toStringRef())) continue;
      auto values = child(states, key.toStringRef());
      for (const auto& [name, value] : values_in(values)) state.parameters[next][name] = as_python_has_it(name, value);
    }
  }
  return state;
}

/// Whether save() is one of LibTorch or lockstep, which write nothing but the states that values_of() knows.
bool is_known(const Optimizer& optimizer) {
  const auto& type = typeid(optimizer);
  for (const auto* known : {&typeid(torch::optim::SGD), &typeid(torch::optim::Adam), &typeid(torch::optim::AdamW),
                            &typeid(torch::optim::Adagrad), &typeid(torch::optim::RMSprop), &typeid(FusedSGD),
                            &typeid(FusedAdam), &typeid(FusedAdamW), &typeid(WithMasterWeights<FusedSGD>),
                            &typeid(WithMasterWeights<FusedAdam>), &typeid(WithMasterWeights<FusedAdamW>)})
    if (type == *known) return true;
  return false;
}

void load_masters(detail::MasterWeights& masters, const Optimizer& optimizer, const OptimizerState& state) {
  for (size_t g = 0; g < state.groups.size(); ++g) {
    const auto& parameters = optimizer.param_groups()[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto values = state.parameters.find(state.groups[g].parameters[i]);
      if (values == state.parameters.end() || !detail::MasterWeights::is_for(parameters[i])) continue;
      if (const auto found = values->second.find(kMaster); found != values->second.end() && found->second.isTensor())
        masters.set(parameters[i], found->second.toTensor());
    }
  }
}

}  // namespace

OptimizerState detail::get_optimizer_state(const Optimizer& optimizer) {
  if (!is_known(optimizer)) return archived_state(optimizer);
  read_step_counts(optimizer);
  OptimizerState state;
  int64_t next = 0;
  for (const auto& from : optimizer.param_groups()) {
    auto& group = state.groups.emplace_back();
    group.options = options_of(from.options());
    for (const auto& parameter : from.params()) {
      group.parameters.push_back(next);
      if (const auto* found = find_state<torch::optim::OptimizerParamState>(optimizer, parameter)) {
        const auto values = values_of(*found).value();
        for (const auto& [name, value] : values) state.parameters[next][name] = as_python_has_it(name, value);
      }
      if (const auto* masters = masters_of(optimizer))
        if (const auto master = masters->find(parameter); master.defined()) state.parameters[next][kMaster] = master;
      ++next;
    }
  }
  return state;
}

int64_t detail::state_bytes(const Optimizer& optimizer) {
  int64_t bytes = 0;
  for (const auto& [parameter, values] : get_optimizer_state(optimizer).parameters)
    for (const auto& [name, value] : values)
      if (name != kStep && value.isTensor()) bytes += static_cast<int64_t>(value.toTensor().nbytes());
  return bytes;
}

void detail::check_fits(const Optimizer& optimizer, const OptimizerState& state) {
  const auto needed = needed_by(optimizer);
  const auto& groups = optimizer.param_groups();
  if (state.groups.size() != groups.size())
    throw UsageError(text("load_state_dict: the state has ", state.groups.size(),
                          " parameter groups, but the optimizer has ", groups.size(),
                          "; construct the optimizer with the same groups"));
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& group = state.groups[g];
    const auto& parameters = groups[g].params();
    if (group.parameters.size() != parameters.size())
      throw UsageError(text("load_state_dict: parameter group ", g, " has ", group.parameters.size(),
                            " parameters in the state and ", parameters.size(),
                            " in the optimizer; construct the optimizer with the same groups"));
    for (size_t i = 0; i < parameters.size(); ++i)
      if (const auto found = state.parameters.find(group.parameters[i]);
          found != state.parameters.end() && !is_empty_state(found->second))
        check_values(group, i, found->second, parameters[i], needed);
    const auto maximize = group.options.find("maximize");
    if (maximize != group.options.end() && maximize->second.isBool() && maximize->second.toBool())
      throw UsageError(text("load_state_dict: parameter group ", g,
                            " of the state has maximize = true, which LibTorch's optimizers do not support; set "
                            "maximize to false and negate the loss"));
  }
}

Value detail::to_value(const OptimizerState& state) {
  auto states = Value::dict(), groups = Value::list();
  for (const auto& [parameter, values] : state.parameters) {
    auto of_parameter = Value::dict();
    for (const auto& [name, value] : values) of_parameter.items().emplace_back(name, detail::value_of(value));
    states.items().emplace_back(parameter, std::move(of_parameter));
  }
  for (const auto& group : state.groups) {
    auto dict = Value::dict();
    for (const auto& [name, value] : group.options) dict.items().emplace_back(name, detail::value_of(value));
    dict.set("params", Value::list({group.parameters.begin(), group.parameters.end()}));
    if (!group.names.empty()) dict.set("param_names", Value::list({group.names.begin(), group.names.end()}));
    groups.elements().push_back(std::move(dict));
  }
  return Value::dict({{"state", std::move(states)}, {"param_groups", std::move(groups)}});
}

OptimizerState detail::to_optimizer_state(const Value& value) {
  if (!value.is(Value::Kind::kDict) || !value.contains("state") || !value.contains("param_groups"))
    throw UsageError(text("load_state_dict: ", value,
                          " is not the state of an optimizer: expected a dict with 'state' and 'param_groups' "
                          "(consolidated_state_dict(dst) returns it on rank dst, and None on the others)"));
  OptimizerState state;
  for (const auto& [parameter, values] : value.at("state").items())
    for (const auto& [name, item] : values.items())
      state.parameters[parameter.as_int()][name.as_string()] = detail::ivalue_of(item);
  for (const auto& dict : value.at("param_groups").elements()) {
    auto& group = state.groups.emplace_back();
    for (const auto& [name, item] : dict.items()) {
      if (name.as_string() == "params")
        for (const auto& parameter : item.elements()) group.parameters.push_back(parameter.as_int());
      else if (name.as_string() == "param_names")
        for (const auto& parameter : item.elements()) group.names.push_back(parameter.as_string());
      else
        group.options[name.as_string()] = detail::ivalue_of(item);
    }
  }
  return state;
}

Value state_dict(const Optimizer& optimizer) {
  return detail::to_value(detail::get_optimizer_state(optimizer));
}

void load_state_dict(Optimizer& optimizer, const Value& value) {
  detail::set_optimizer_state(optimizer, detail::to_optimizer_state(value));
}

void detail::set_optimizer_state(Optimizer& optimizer, const OptimizerState& state) {
  check_fits(optimizer, state);
  auto written = archive_of(optimizer, state);
  auto archive = reopen(written, device_of_state(optimizer));
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  for (size_t g = 0; g < state.groups.size(); ++g)
    options.push_back(changed(optimizer.param_groups()[g].options(), state.groups[g].options));

  auto before = std::move(optimizer.state());
  optimizer.state().clear();
  try {
    optimizer.load(archive);
  } catch (...) {
    optimizer.state() = std::move(before);
    throw;
  }
  for (size_t g = 0; g < options.size(); ++g) optimizer.param_groups()[g].set_options(std::move(options[g]));
  if (auto* masters = masters_of(optimizer)) load_masters(*masters, optimizer, state);
}

}  // namespace lockstep
