#pragma once

#include <optional>

#include <nlohmann/json.hpp>

namespace lockstep::bench {

/// A JSON value, or null where nothing was measured.
template <class Number>
nlohmann::ordered_json or_null(const std::optional<Number>& number) {
  return number ? nlohmann::ordered_json(*number) : nlohmann::ordered_json();
}

}  // namespace lockstep::bench
