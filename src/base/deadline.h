#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

/// Returns the time point `time` after `begin`. Limits `time` to one year, so that the time point does not overflow.
inline std::chrono::steady_clock::time_point deadline_after(
    std::chrono::milliseconds time, std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now()) {
  return begin + std::min<std::chrono::milliseconds>(time, std::chrono::hours(24 * 365));
}

}  // namespace lockstep
