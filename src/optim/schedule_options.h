#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>

#include <lockstep/error.h>
#include <lockstep/schedules.h>

#include "base/text.h"

namespace lockstep::detail {

/// Throws unless `is_valid`.
template <class T>
inline void check_option(bool is_valid, std::string_view schedule, std::string_view option, const T& actual,
                         std::string_view expected) {
  if (!is_valid) throw UsageError(text(schedule, ": ", option, " is ", actual, ", expected ", expected));
}

inline void check_positive(std::string_view schedule, std::string_view option, int64_t actual) {
  check_option(actual > 0, schedule, option, actual, "1 or more");
}

inline void check_not_negative(std::string_view schedule, std::string_view option, double actual) {
  check_option(actual >= 0 && std::isfinite(actual), schedule, option, actual, "0 or more");
}

inline void check_rates(std::string_view schedule, std::string_view option, const PerGroup& rates) {
  if (!rates.is_set())
    throw UsageError(
        text(schedule, ": ", option, " is not set, expected a learning rate, or one for each parameter group"));
  for (const double rate : rates.values()) check_not_negative(schedule, option, rate);
}

inline void check_momenta(std::string_view schedule, std::string_view option, const PerGroup& momenta) {
  if (!momenta.is_set())
    throw UsageError(text(schedule, ": ", option, " is not set, expected a momentum, or one for each parameter group"));
  for (const double momentum : momenta.values())
    check_option(momentum >= 0 && momentum < 1, schedule, option, momentum, "at least 0 and less than 1");
}

template <class Rule, class... Arguments>
Schedule make_schedule(Arguments&&... arguments) {
  return Schedule(std::make_shared<Rule>(std::forward<Arguments>(arguments)...));
}

}  // namespace lockstep::detail
