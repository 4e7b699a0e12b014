#pragma once

#include <signal.h>

#include <cerrno>
#include <cstring>

#include <gtest/gtest.h>

/// Sends a signal to one process. Refuses a pid of 1 or less: 0 and -1 would signal a process group or all processes.
inline testing::AssertionResult send_signal(int pid, int number) {
  if (pid <= 1) return testing::AssertionFailure() << pid << " is no process of a test";
  if (::kill(pid, number) != 0) return testing::AssertionFailure() << "kill " << pid << ": " << std::strerror(errno);
  return testing::AssertionSuccess();
}
