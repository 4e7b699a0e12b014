#pragma once

#include <concepts>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

#include <lockstep/export.h>

namespace lockstep {

namespace detail {

/// Options of a parameter group, of any optimizer: converts from torch::optim::AdamWOptions and others.
class GroupOptions {
 public:
  template <std::derived_from<torch::optim::OptimizerOptions> Options>
  GroupOptions(const Options& options) : options_(std::make_shared<Options>(options)) {}

  std::unique_ptr<torch::optim::OptimizerOptions> clone() const { return options_->clone(); }

 private:
  std::shared_ptr<const torch::optim::OptimizerOptions> options_;
};

/// Parameters by name, as DistributedDataParallel or a module lists them.
class NamedParameters {
 public:
  NamedParameters(std::vector<std::pair<std::string, at::Tensor>> parameters) : parameters_(std::move(parameters)) {}
  NamedParameters(const torch::OrderedDict<std::string, at::Tensor>& parameters) {
    for (const auto& item : parameters) parameters_.emplace_back(item.key(), item.value());
  }

  const std::vector<std::pair<std::string, at::Tensor>>& list() const { return parameters_; }

 private:
  std::vector<std::pair<std::string, at::Tensor>> parameters_;
};

struct DecayGroups {
  std::vector<at::Tensor> with_decay, without_decay;
};
LOCKSTEP_EXPORT DecayGroups divide_by_decay(const NamedParameters& parameters);
/// A weight decay without effect, which the optimizer does not replace. `class_default` is the default of the options.
LOCKSTEP_EXPORT double no_weight_decay(double class_default);

}  // namespace detail

/// Options for the parameters whose names match a pattern.
struct ParameterRule {
  /// Must match the whole name. '*' stands for any characters, dots included, '?' for one character. All other
  /// characters stand for themselves.
  std::string pattern;
  /// Options of the optimizer, such as torch::optim::AdamWOptions. Options that differ in one value from others:
  /// `AdamWOptions(others).weight_decay(0)`.
  detail::GroupOptions options;
};

/// Divides parameters into groups for an optimizer: one group for each rule, and a last group, without options, for
/// parameters that no rule matches. The last group gets the optimizer's defaults. The first rule that matches a name
/// decides:
///
///     auto groups = lockstep::parameter_groups(ddp.named_parameters(), {
///         {.pattern = "*.bias", .options = AdamWOptions(1e-3).weight_decay(0)},
///         {.pattern = "head.*", .options = AdamWOptions(1e-2)},
///     });
///     torch::optim::AdamW optimizer(groups, AdamWOptions(1e-3));
///
/// `parameters` are named_parameters() of a DistributedDataParallel or of a module. Frozen parameters are left out, and
/// so are groups without parameters. A parameter with several names is listed once, under its first name. Not
/// collective; use the same rules on all ranks.
///
/// LibTorch 2.10 and later replaces an option that has the default of its class by the optimizer's: with SGD,
/// `.weight_decay(0)` in a rule has no effect if the optimizer's own options have a weight decay. Give such options to
/// the optimizer only if all groups share them.
///
/// Throws UsageError, which names the pattern, if a rule matches no name or only names that earlier rules match. Throws
/// UsageError if all parameters are frozen.
LOCKSTEP_EXPORT std::vector<torch::optim::OptimizerParamGroup> parameter_groups(
    const detail::NamedParameters& parameters, const std::vector<ParameterRule>& rules);

/// Divides parameters into two groups: parameters with two or more dimensions get `options`; the other parameters,
/// which are biases and the weights of normalization layers, get `options` without weight decay, whatever the
/// optimizer's own options are. Otherwise like parameter_groups().
template <std::derived_from<torch::optim::OptimizerOptions> Options>
std::vector<torch::optim::OptimizerParamGroup> weight_decay_groups(const detail::NamedParameters& parameters,
                                                                   const Options& options) {
  auto [with_decay, without_decay] = detail::divide_by_decay(parameters);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  auto no_decay = std::make_unique<Options>(options);
  no_decay->weight_decay(detail::no_weight_decay(Options(options.get_lr()).weight_decay()));
  if (!with_decay.empty()) groups.emplace_back(std::move(with_decay), std::make_unique<Options>(options));
  if (!without_decay.empty()) groups.emplace_back(std::move(without_decay), std::move(no_decay));
  return groups;
}

}  // namespace lockstep
