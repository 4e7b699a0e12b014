#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep::tool {

/// What a child process printed, and how it ended.
struct CapturedProcess {
  std::string output{};         // stdout
  std::string errors{};         // stderr
  int status = 0;               // as waitpid has it
  bool timed_out = false;       // it was killed
  std::string start_failure{};  // why it could not be started; all else is then without meaning
};

/// Starts a child and waits for its end. `start` gets the descriptors that the child's stdout and stderr shall be, and
/// returns its pid, or minus the error; the child must lead a process group of its own. After `limit` it is killed, and
/// with it all that it started and that still has its process group; one that a driver keeps from dying is left behind.
CapturedProcess capture_output(const std::function<pid_t(int out, int err)>& start, std::chrono::milliseconds limit);

/// What a program printed, or why there is nothing to read.
struct ProgramOutput {
  std::string output{};   // stdout
  std::string failure{};  // empty: it ended by itself with code 0
};

/// Runs arguments[0], a path, and waits for its end. After `limit` it is killed, and with it all that it started and
/// that still has its process group. Its stdin is empty; what it says on stderr becomes part of `failure`.
ProgramOutput run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit);

/// Where the program is that does with LibTorch what lockstep, which does not load it, cannot: beside lockstep, or in
/// ../libexec/lockstep where it is installed. Empty when it is in neither.
std::filesystem::path find_helper_program(const std::string& name);

/// What stands before the command of ranks that mpirun starts, as the one worker of our launcher: they meet at the
/// launcher's store, but what it says of its worker's rank is not for them.
inline std::vector<std::string> mpirun_command(int ranks) {
  std::vector<std::string> command{"mpirun", "-n", std::to_string(ranks), "--oversubscribe", "--bind-to", "none"};
  if (::geteuid() == 0) command.push_back("--allow-run-as-root");
  command.push_back("env");
  for (const char* variable : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"})
    command.insert(command.end(), {"-u", variable});
  return command;
}

inline bool has_mpirun() {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path ? path : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (::access((folder + "/mpirun").c_str(), X_OK) == 0) return true;
  return false;
}

}  // namespace lockstep::tool
