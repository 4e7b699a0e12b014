#include <lockstep/parameter_groups.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <unordered_set>

#include <lockstep/error.h>
#include "comm/torch_version.h"

#include "base/text.h"

namespace lockstep {
namespace {

constexpr size_t kMaxNamesShown = 8;

using NamedParameter = std::pair<std::string, at::Tensor>;

/// Matches greedily; after a mismatch, the last '*' takes one more character. Linear but for repeated stars.
bool matches(std::string_view pattern, std::string_view name) {
  size_t p = 0, n = 0;
  size_t star = std::string_view::npos,
         taken = 0;  // the last '*', and the position in the name behind the characters that it matches
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p;
      ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      n = ++taken;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

/// Returns each parameter that is trained, under its first name.
std::vector<NamedParameter> trained_once(const std::vector<NamedParameter>& parameters, const char* call) {
  std::vector<NamedParameter> trained;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& [name, parameter] : parameters)
    if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second)
      trained.emplace_back(name, parameter);
  if (trained.empty())
    throw UsageError(text(call, ": none of the ", parameters.size(),
                          " parameters requires a gradient, so there is nothing to optimize"));
  return trained;
}

std::string some_names(const std::vector<NamedParameter>& parameters) {
  std::vector<std::string> names;
  for (size_t i = 0; i < std::min(parameters.size(), kMaxNamesShown); ++i) names.push_back(parameters[i].first);
  if (parameters.size() > kMaxNamesShown) names.push_back(text(parameters.size() - kMaxNamesShown, " more"));
  return enumerate(names);
}

/// Throws UsageError if a rule applies to no parameter.
void check_rules(const std::vector<NamedParameter>& parameters, const std::vector<ParameterRule>& rules) {
  for (size_t rule = 0; rule < rules.size(); ++rule) {
    const auto& pattern = rules[rule].pattern;
    bool matches_any = false, decides = false;
    for (const auto& [name, parameter] : parameters) {
      if (!matches(pattern, name)) continue;
      matches_any = true;
      const auto is_earlier = [&name = name](const ParameterRule& other) { return matches(other.pattern, name); };
      decides |= std::none_of(rules.begin(), rules.begin() + static_cast<ptrdiff_t>(rule), is_earlier);
    }
    if (!matches_any)
      throw UsageError(text("parameter_groups: the pattern '", pattern, "' matches no parameter; it must match the ",
                            "whole name. The names are ", some_names(parameters)));
    if (!decides)
      throw UsageError(text("parameter_groups: earlier rules match all parameters that the pattern '", pattern,
                            "' matches, and the first match decides; put this rule before them"));
  }
}

}  // namespace

std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const detail::NamedParameters& parameters,
                                                                const std::vector<ParameterRule>& rules) {
  check_rules(parameters.list(), rules);
  std::vector<std::vector<at::Tensor>> members(rules.size() + 1);  // the last: parameters that no rule matches
  for (const auto& [name, parameter] : trained_once(parameters.list(), "parameter_groups")) {
    const auto is_match = [&name = name](const ParameterRule& rule) { return matches(rule.pattern, name); };
    members[std::find_if(rules.begin(), rules.end(), is_match) - rules.begin()].push_back(parameter);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (size_t i = 0; i < rules.size(); ++i)
    if (!members[i].empty()) groups.emplace_back(std::move(members[i]), rules[i].options.clone());
  if (!members.back().empty()) groups.emplace_back(std::move(members.back()));
  return groups;
}

detail::DecayGroups detail::divide_by_decay(const NamedParameters& parameters) {
  DecayGroups groups;
  for (const auto& [name, parameter] : trained_once(parameters.list(), "weight_decay_groups"))
    (parameter.dim() >= 2 ? groups.with_decay : groups.without_decay).push_back(parameter);
  return groups;
}

double detail::no_weight_decay(double class_default) {
  // A number other than 0 is not replaced. The smallest one changes no gradient and no weight.
  const bool would_be_replaced = kReplacesDefaultsOfGroups && class_default == 0;
  return would_be_replaced ? std::numeric_limits<double>::denorm_min() : 0;
}

}  // namespace lockstep
