#pragma once

#include <cstdlib>
#include <optional>
#include <string>

#include <lockstep/environment.h>
#include <lockstep/error.h>

#include "base/text.h"

namespace lockstep {

/// Returns the value of an environment variable of this process. An Environment::Lookup.
inline std::optional<std::string> process_variable(const std::string& variable) {
  const char* value = std::getenv(variable.c_str());
  if (value == nullptr) return std::nullopt;
  return value;
}

/// Throws UsageError: the variable has an invalid value.
[[noreturn]] inline void refuse_value(const std::string& variable, const std::string& value,
                                      const std::string& expected) {
  throw UsageError(text(variable, " is \"", value, "\": it must be ", expected));
}

/// Returns the variable's value as a number; none if it is not set. Throws UsageError if it is not a number from
/// `least` to `most`.
inline std::optional<int> read_number(const Environment::Lookup& lookup, const std::string& variable, int least,
                                      int most) {
  auto value = lookup(variable);
  if (!value) return std::nullopt;
  auto number = parse_number<int>(*value);
  if (!number || *number < least || *number > most)
    refuse_value(variable, *value, text("a whole number from ", least, " to ", most));
  return number;
}

}  // namespace lockstep
