#pragma once

#include <unistd.h>

#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace lockstep::tool {

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
