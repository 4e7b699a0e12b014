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

/// The output and the exit status of a child process.
struct CapturedProcess {
  std::string output{};         // stdout
  std::string errors{};         // stderr
  int status = 0;               // as returned by waitpid
  bool timed_out = false;       // it was killed after the time limit
  std::string start_failure{};  // why it could not be started; the other members are then meaningless
};

/// Starts a child process and blocks until it ends. `start` receives the descriptors for the child's stdout and stderr
/// and returns its pid, or a negative errno; the child must lead its own process group. After `limit` the process group
/// is killed. A child that a hanging driver keeps alive even then is abandoned.
CapturedProcess capture_output(const std::function<pid_t(int out, int err)>& start, std::chrono::milliseconds limit);

/// The output of a program, or why it failed.
struct ProgramOutput {
  std::string output{};   // stdout
  std::string failure{};  // empty: it exited with code 0
};

/// Runs arguments[0], a path, and blocks until it ends. After `limit` its process group is killed. Its stdin is empty;
/// the last line of its stderr becomes part of `failure`.
ProgramOutput run_program(const std::vector<std::string>& arguments, std::chrono::milliseconds limit);

/// Finds a helper program, which links LibTorch, unlike lockstep itself: beside lockstep, or in ../libexec/lockstep if
/// installed. Returns an empty path if it is in neither place.
std::filesystem::path find_helper_program(const std::string& name);

/// The command prefix to start ranks by mpirun as the single worker of lockstep's launcher. The ranks use the
/// launcher's store; the variables with the worker's own rank are unset for them.
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
