#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

/// When `time` from now, or from `begin`, is over. Longer than a year counts as a year: a deadline must stay within
/// what the clock counts.
inline std::chrono::steady_clock::time_point deadline_after(
    std::chrono::milliseconds time, std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now()) {
  return begin + std::min<std::chrono::milliseconds>(time, std::chrono::hours(24 * 365));
}

}  // namespace lockstep
