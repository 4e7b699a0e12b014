#pragma once

#include <string>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

/// Accepts a number of seconds from 0 (or above 0 if `is_positive`) to 31 years. CLI11's own checks accept NaN and
/// print the largest double as the bound.
inline CLI::Validator is_seconds(bool is_positive = false) {
  constexpr double kMost = 1e9;
  return CLI::Validator(
      [=](std::string& written) {
        double seconds = 0;
        const bool is_number = CLI::detail::lexical_cast(written, seconds);
        const bool is_valid = is_number && seconds <= kMost && (is_positive ? seconds > 0 : seconds >= 0);
        if (is_valid) return std::string();
        return fmt::format("{} is not valid: it must be a number of seconds {} and at most {:.0f}", written,
                           is_positive ? "above 0" : "of 0 or more", kMost);
      },
      "");
}
