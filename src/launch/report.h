#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/launch_options.h>

namespace lockstep {

/// How one worker ended, as its launcher saw it.
struct WorkerEnd {
  int rank = 0;
  std::string host;
  int pid = 0;                    // 0: it could not be started
  int status = 0;                 // as waitpid has it
  std::string how;                // in words: "exit code 1", "killed: out of memory"
  std::string uncaught;           // what an exception that nobody caught said
  std::vector<std::string> tail;  // the last lines of its stderr
  std::string logs;               // the folder with its output; empty: none
  double seconds = 0;             // that it ran
  bool after_stop = false;        // it ended when the launcher had begun to stop the workers
  bool was_stopped = false;       // by the launcher: how it ended says nothing about why

  bool failed() const { return status != 0 || pid == 0; }
};

/// "exit code 3", "killed by SIGSEGV (segmentation fault)"; with `out_of_memory`, SIGKILL is "killed: out of memory".
std::string describe_status(int status, bool out_of_memory);

/// How the job ended.
struct LaunchReport {
  LaunchExit exit = LaunchExit::kSuccess;
  std::optional<WorkerEnd> culprit;     // the rank that the store blames, else the first that failed
  std::vector<WorkerEnd> consequences;  // the others that failed
  std::vector<WorkerEnd> ended_before;  // well, before the culprit did
  std::string notice;                   // what the store told the ranks
  std::string kind;                     // of the error that they got: "PeerError", "TimeoutError", "MismatchError"
  std::string message;                  // when no worker is to blame
  int restarts = 0;
  double seconds = 0;  // of the whole job
};

/// Sorts out who failed first: the rank that the store named, if any failed, for it may have ended well and too early;
/// else the first of `ends`, which are in the order in which the workers of each node ended, that did so before the
/// launcher stopped them.
LaunchReport make_report(const std::vector<WorkerEnd>& ends, std::optional<int64_t> named_rank,
                         const std::string& notice);

/// For people; ends with a line end. Empty when all went well.
std::string describe_report(const LaunchReport& report);
/// One line.
std::string report_to_json(const LaunchReport& report);

/// The ends of workers as they travel between nodes.
std::string pack_ends(const std::vector<WorkerEnd>& ends);
std::vector<WorkerEnd> unpack_ends(const std::string& packed);

}  // namespace lockstep
