#pragma once

#include <unistd.h>

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

}  // namespace lockstep::tool
