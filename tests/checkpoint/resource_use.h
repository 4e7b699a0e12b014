#pragma once

#include <malloc.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

#include "support/slowness.h"

/// Memory and processor time of this process.
namespace lockstep {

/// The processor time of this thread, which does not depend on what else the machine does.
inline double seconds_of_thread() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// How many times longer the call takes for an input of size 10 n than of size n: 10 if its work is linear, 100 if
/// quadratic.
template <class Make, class Call>
double growth(int n, const Make& make, const Call& call) {
  const auto seconds = [&](int size) {
    const auto input = make(size);
    double least = 1e9;
    for (int i = 0; i < 3; ++i) {
      const double begin = seconds_of_thread();
      call(input);
      least = std::min(least, seconds_of_thread() - begin);
      if (least > 0.1) break;
    }
    return least;
  };
  return seconds(10 * n) / std::max(seconds(n), 1e-4);
}

constexpr double kLinear = 40;  // more than any linear call, less than a quadratic one

/// A line of /proc/self/status in bytes.
inline int64_t memory(const std::string& name) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(name + ":")) return std::stoll(line.substr(name.size() + 1)) * 1024;
  return 0;
}

/// The most memory that the call takes beyond what the process has.
template <class Call>
int64_t peak_of(const Call& call) {
  ::malloc_trim(0);  // else the call could use what others have freed
  std::ofstream clear("/proc/self/clear_refs");
  clear << "5" << std::flush;  // begins a new VmHWM
  EXPECT_TRUE(clear.good()) << "VmHWM is that of the whole process";
  const auto before = memory("VmRSS");
  call();
  return std::max<int64_t>(0, memory("VmHWM") - before);
}

/// The memory of what the call returns.
template <class Make>
int64_t size_of(const Make& make) {
  ::malloc_trim(0);
  const auto before = memory("VmRSS");
  const auto made = make();
  ::malloc_trim(0);
  return memory("VmRSS") - before;
}

constexpr int64_t kMega = 1 << 20;

/// Memory that only sanitizers need: they keep what was freed, and guard each allocation.
inline int64_t of_sanitizers(int64_t limit) {
  return kSlowness > 1 ? 4 * limit + 512 * kMega : 0;
}

}  // namespace lockstep
