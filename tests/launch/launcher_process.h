#pragma once

#include <dirent.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "support/rank_process.h"

namespace lockstep {

/// `lockstep run` with these arguments, without what an outer launcher may have set.
inline std::vector<std::string> run_command(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), {LOCKSTEP_TOOL, "run"});
  return arguments;
}

inline std::map<std::string, std::string> clean_environment(std::map<std::string, std::string> variables = {}) {
  for (const char* name : {"OMP_NUM_THREADS", "LOCKSTEP_SECRET_FILE", "LOCKSTEP_JOB_ID", "LOCKSTEP_INIT_METHOD", "RANK",
                           "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
                           "CUDA_VISIBLE_DEVICES", "NO_COLOR", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                           "PMI_RANK", "PMI_SIZE", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "JOB_COMPLETION_INDEX"})
    variables.emplace(name, "");
  return variables;
}

struct Finished {
  int code = -1;
  std::string output;  // of both streams
};

/// Starts it and waits for its end.
inline Finished run_launcher(const std::vector<std::string>& arguments,
                             const std::map<std::string, std::string>& variables = {}) {
  RankProcess process(run_command(arguments), clean_environment(variables));
  Finished finished;
  finished.code = process.wait(std::chrono::seconds(60));
  finished.output = process.output();
  return finished;
}

/// The lines that begin so, without that beginning.
inline std::vector<std::string> lines_after(const std::string& output, const std::string& beginning) {
  std::vector<std::string> found;
  for (size_t begin = 0, end; begin < output.size(); begin = end + 1) {
    end = std::min(output.find('\n', begin), output.size());
    auto line = output.substr(begin, end - begin);
    if (line.starts_with(beginning)) found.push_back(line.substr(beginning.size()));
  }
  return found;
}

/// The processes that have this variable in their environment: all that a launcher with it started, and itself.
inline std::vector<int> processes_with(const std::string& variable) {
  std::vector<int> found;
  DIR* folder = ::opendir("/proc");
  while (const dirent* entry = ::readdir(folder)) {
    const int pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    std::ifstream file("/proc/" + std::to_string(pid) + "/environ");
    std::string bytes{std::istreambuf_iterator<char>(file), {}};
    if (("\0" + bytes).find(variable + '\0') != std::string::npos) found.push_back(pid);
  }
  ::closedir(folder);
  return found;
}

}  // namespace lockstep
