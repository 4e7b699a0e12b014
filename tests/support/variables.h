#pragma once

#include <map>
#include <optional>
#include <string>

#include <lockstep/environment.h>

/// Environment variables of a simulated process, which the test does not start.
namespace lockstep {

using Variables = std::map<std::string, std::string>;

inline Environment::Lookup lookup_in(const Variables& variables) {
  return [variables](const std::string& variable) -> std::optional<std::string> {
    auto found = variables.find(variable);
    if (found == variables.end()) return std::nullopt;
    return found->second;
  };
}

inline Variables with(Variables variables, const Variables& changes) {
  for (const auto& [name, value] : changes) variables[name] = value;
  return variables;
}

}  // namespace lockstep
