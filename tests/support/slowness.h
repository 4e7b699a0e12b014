#pragma once

#include <cstdlib>

/// How much longer everything may take under a sanitizer.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr int kSlowness = 10;
#else
constexpr int kSlowness = 1;
#endif

/// Whether this is a test of the long tier, which has the full counts and all combinations.
inline bool is_long_tier() {
  const char* soak = std::getenv("LOCKSTEP_TEST_SOAK");
  return soak && *soak;
}

/// The full counts are for the long tier.
inline int soak_count(int full) {
  return is_long_tier() ? full : full / 20;
}
