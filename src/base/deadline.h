#pragma once

#include <algorithm>
#include <chrono>

namespace lockstep {

/// When `time` from now is over. Longer than a year counts as a year: a deadline must stay within what the clock
/// counts.
inline std::chrono::steady_clock::time_point deadline_after(std::chrono::milliseconds time) {
  return std::chrono::steady_clock::now() + std::min<std::chrono::milliseconds>(time, std::chrono::hours(24 * 365));
}

}  // namespace lockstep
