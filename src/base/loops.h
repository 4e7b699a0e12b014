#pragma once

// Before a loop: its iterations do not depend on each other, so the compiler may vectorise it without a check for
// overlap.
#if defined(__clang__)
#define LOCKSTEP_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define LOCKSTEP_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif
