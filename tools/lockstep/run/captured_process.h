#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>

namespace lockstep::tool {

/// What a child process printed, and how it ended.
struct CapturedProcess {
  std::string output{};   // stdout
  std::string errors{};   // stderr
  int status = 0;         // as waitpid has it
  bool is_late = false;   // it was killed
  std::string refusal{};  // why it could not be started; all else is then without meaning
};

/// Starts a child and waits for its end. `start` gets the descriptors that the child's stdout and stderr shall be, and
/// returns its pid, or minus the error; the child must lead a process group of its own. After `limit` it is killed, and
/// with it all that it started and that still has its process group; one that a driver keeps from dying is left behind.
CapturedProcess capture(const std::function<pid_t(int out, int err)>& start, std::chrono::milliseconds limit);

}  // namespace lockstep::tool
