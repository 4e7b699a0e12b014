#pragma once

#include <signal.h>

#include <cerrno>
#include <cstring>

#include <gtest/gtest.h>

/// Sends a signal to one process: never to a group or to all of them, as a number that was not found (0, -1) would.
inline testing::AssertionResult send_signal(int pid, int number) {
  if (pid <= 1) return testing::AssertionFailure() << pid << " is no process of a test";
  if (::kill(pid, number) != 0) return testing::AssertionFailure() << "kill " << pid << ": " << std::strerror(errno);
  return testing::AssertionSuccess();
}
