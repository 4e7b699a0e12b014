#include "optim/optimizer_state.h"

#include <set>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/serialize/archive.h>

#include <lockstep/error.h>

#include "base/text.h"

// LibTorch's optimizers show what they know in archives alone, and take it back from there; so does this.

namespace lockstep {
namespace {

using torch::optim::Optimizer;
using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;
using Values = OptimizerState::Values;

/// What was written, to be read.
InputArchive reopen(OutputArchive& written) {
  std::stringstream bytes;
  written.save_to(bytes);
  InputArchive archive;
  archive.load_from(bytes);
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

int64_t number_in(InputArchive& archive, const std::string& name) {
  at::Tensor number;
  archive.read(name, number);
  return number.item<int64_t>();
}

Values options_of(const torch::optim::OptimizerOptions& options) {
  auto archive = new_archive();
  options.serialize(archive);
  auto written = reopen(archive);
  return values_in(written);
}

/// Python keeps it in a tensor, LibTorch in a number.
constexpr const char* kStep = "step";

c10::IValue as_python_has_it(const std::string& name, const c10::IValue& value) {
  if (name == kStep && value.isInt()) return at::scalar_tensor(static_cast<double>(value.toInt()), at::kFloat);
  return value;
}

c10::IValue as_libtorch_has_it(const std::string& name, const c10::IValue& value, const at::Tensor& parameter) {
  if (name == kStep && value.isTensor()) return static_cast<int64_t>(value.toTensor().item<double>());
  if (name == kStep && value.isDouble()) return static_cast<int64_t>(value.toDouble());
  if (!value.isTensor()) return value;
  const auto tensor = value.toTensor();
  return tensor.to(parameter.device(), tensor.is_floating_point() ? parameter.scalar_type() : tensor.scalar_type(),
                   /*non_blocking=*/false, /*copy=*/true);
}

/// A number of the kind that the option has now.
c10::IValue as_option(const c10::IValue& value, const c10::IValue& now) {
  if (now.isDouble() && value.isInt()) return static_cast<double>(value.toInt());
  if (now.isDouble() && value.isTensor()) return value.toTensor().item<double>();
  return value;
}

// --- what must fit

std::string name_of(const OptimizerState::Group& group, size_t i) {
  if (i < group.names.size()) return text("parameter '", group.names[i], "'");
  return text("parameter ", group.parameters[i]);
}

const std::set<std::string> kOfParametersSizes = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer",
                                                  "sum",     "square_avg", "grad_avg"};

void check_values(const OptimizerState::Group& group, size_t i, const Values& values, const at::Tensor& parameter) {
  for (const auto& [name, value] : values)
    if (kOfParametersSizes.count(name) && value.isTensor() && value.toTensor().sizes() != parameter.sizes())
      throw UsageError(text("load_state_dict: '", name, "' of ", name_of(group, i), " is of sizes ",
                            value.toTensor().sizes(), ", and the parameter of ", parameter.sizes(),
                            ": the state is another model's"));
}

/// In the form that LibTorch's optimizers load.
OutputArchive archive_of(const Optimizer& optimizer, const OptimizerState& state) {
  auto archive = new_archive();
  const auto unit = archive.compilation_unit();
  OutputArchive states(unit), groups(unit);
  groups.write("param_groups/size", at::scalar_tensor(static_cast<int64_t>(state.groups.size()), at::kLong));
  for (size_t g = 0; g < state.groups.size(); ++g) {
    const auto& group = state.groups[g];
    const auto& parameters = optimizer.param_groups()[g].params();
    OutputArchive one(unit), options(unit);
    one.write("params/size", at::scalar_tensor(static_cast<int64_t>(parameters.size()), at::kLong));
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto key = std::to_string(group.parameters[i] + 1);  // it may become a pointer, and 0 is none
      one.write(text("params/", i), c10::IValue(key));
      const auto found = state.parameters.find(group.parameters[i]);
      if (found == state.parameters.end()) continue;
      OutputArchive values(unit);
      for (const auto& [name, value] : found->second)
        values.write(name, as_libtorch_has_it(name, value, parameters[i]));
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

}  // namespace

void detail::check_fits(const Optimizer& optimizer, const OptimizerState& state) {
  const auto& groups = optimizer.param_groups();
  if (state.groups.size() != groups.size())
    throw UsageError(text("load_state_dict: the state is of ", state.groups.size(),
                          " groups of parameters, and the optimizer has ", groups.size()));
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto& group = state.groups[g];
    const auto& parameters = groups[g].params();
    if (group.parameters.size() != parameters.size())
      throw UsageError(text("load_state_dict: group ", g, " of the state has ", group.parameters.size(),
                            " parameters, and that of the optimizer has ", parameters.size()));
    for (size_t i = 0; i < parameters.size(); ++i)
      if (const auto found = state.parameters.find(group.parameters[i]); found != state.parameters.end())
        check_values(group, i, found->second, parameters[i]);
    const auto maximize = group.options.find("maximize");
    if (maximize != group.options.end() && maximize->second.isBool() && maximize->second.toBool())
      throw UsageError(text("load_state_dict: group ", g,
                            " of the state maximizes, which LibTorch's optimizers cannot; negate the loss and the "
                            "option"));
  }
}

OptimizerState state_dict(const Optimizer& optimizer) {
  auto saved = new_archive();
  optimizer.save(saved);
  auto archive = reopen(saved);
  auto states = child(archive, "state");
  auto groups = child(archive, "param_groups");
  const auto keys = states.keys();
  const std::set<std::string> with_state(keys.begin(), keys.end());

  OptimizerState state;
  int64_t next = 0;
  const int64_t group_count = number_in(groups, "param_groups/size");
  for (int64_t g = 0; g < group_count; ++g) {
    auto saved_group = child(groups, text("param_groups/", g));
    auto options = child(saved_group, "options");
    auto& group = state.groups.emplace_back();
    group.options = values_in(options);
    const int64_t size = number_in(saved_group, "params/size");
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

void load_state_dict(Optimizer& optimizer, const OptimizerState& state) {
  detail::check_fits(optimizer, state);
  optimizer.state().clear();
  auto written = archive_of(optimizer, state);
  auto archive = reopen(written);
  optimizer.load(archive);
  for (size_t g = 0; g < state.groups.size(); ++g) {
    auto& options = optimizer.param_groups()[g].options();
    auto values = options_of(options);
    for (auto& [name, value] : values)
      if (const auto found = state.groups[g].options.find(name); found != state.groups[g].options.end())
        value = as_option(found->second, value);
    auto changed = new_archive();
    write(changed, values);
    auto read = reopen(changed);
    options.serialize(read);
  }
}

}  // namespace lockstep
