#pragma once

#include <time.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>

/// The time for which processors of a virtual machine had work but the host let them wait, since the machine was
/// started, summed over the processors. Limits of a test leave it out: nothing runs in it.
inline std::chrono::milliseconds stolen_time() {
  std::ifstream stat("/proc/stat");
  std::string name;
  stat >> name;
  int64_t ticks = 0;
  for (int column = 1; column <= 8; ++column) stat >> ticks;  // user nice system idle iowait irq softirq steal
  return std::chrono::milliseconds(ticks * 1000 / ::sysconf(_SC_CLK_TCK));
}

/// The time for which the calling thread has computed. Unlike the time on a clock, it does not grow while other
/// processes use the processor: for limits of the cost of an algorithm.
inline std::chrono::nanoseconds thread_cpu_time() {
  timespec time{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

/// Measures from its construction.
class Stopwatch {
 public:
  using Clock = std::chrono::steady_clock;

  Clock::duration elapsed() const { return Clock::now() - begin_; }
  /// Without the time that the host has stolen, for upper limits.
  Clock::duration unstolen() const { return elapsed() - (stolen_time() - stolen_before_); }

 private:
  Clock::time_point begin_ = Clock::now();
  std::chrono::milliseconds stolen_before_ = stolen_time();
};
