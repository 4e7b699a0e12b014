#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/launch_options.h>

#include "rendezvous/failure.h"

namespace lockstep {

/// How one worker ended, as seen by its launcher.
struct WorkerEnd {
  int rank = 0;
  std::string host;
  int pid = 0;                    // 0 if it could not be started
  int status = 0;                 // of waitpid
  std::string description;        // in words: "exit code 1", "killed: out of memory"
  std::string uncaught;           // type and message of an uncaught exception
  std::vector<std::string> tail;  // the last lines of its stderr
  std::string logs;               // the folder with its output; may be empty
  double seconds = 0;             // run time
  bool after_stop = false;        // it ended after the launcher began to stop the workers
  bool was_stopped = false;       // by a signal of the launcher, so `status` does not show the cause
  bool out_of_memory = false;     // the kernel killed it because memory ran out

  bool failed() const { return status != 0 || pid == 0; }
};

/// Whether the worker ended with the exit code of a PreemptionGuard.
bool was_preempted(const WorkerEnd& end);

/// "exit code 3", "killed by SIGSEGV (segmentation fault)"; with `out_of_memory`, SIGKILL is "killed: out of memory".
std::string describe_status(int status, bool out_of_memory);

/// A command as a shell reads it: quotes the arguments that a shell would change.
std::string in_shell(const std::vector<std::string>& command);

/// How the job ended.
struct LaunchReport {
  LaunchExit exit = LaunchExit::kSuccess;
  std::optional<WorkerEnd> culprit;     // the rank that the store blames, else the first that failed
  std::vector<WorkerEnd> same_error;    // workers that threw the same error as the culprit
  std::vector<WorkerEnd> consequences;  // the other failed workers
  std::vector<WorkerEnd> ended_before;  // with success, before the culprit ended
  std::optional<Failure> notice;        // the failure that the store sent to the ranks
  std::string message;                  // used if no worker is the cause
  std::vector<std::string> command;     // of the workers, for advice
  int restarts = 0;
  double seconds = 0;  // of the whole job
};

/// Determines the culprit, if any worker failed. The culprit is the rank that `notice` names, even if it exited with
/// success, because it may have exited too early. Otherwise the culprit is the first failed worker of `ends` that ended
/// before the launcher stopped the workers. `ends` must be in the order in which the workers of each node ended.
LaunchReport make_report(const std::vector<WorkerEnd>& ends, const std::optional<Failure>& notice);

/// How an attempt ended on one node.
struct Outcome {
  std::vector<WorkerEnd> ends;  // in the order in which the workers ended
  std::optional<int> signal;    // received by this launcher or by another node's
  std::string broken;           // why the launcher cannot continue; empty if it can
};

/// The decision for all nodes after an attempt has ended on all nodes.
struct Verdict {
  bool restart = false;
  LaunchReport report;
};

/// Decides, from the outcome of all nodes, whether to restart, and makes the report.
Verdict decide(const Outcome& outcome, const std::optional<Failure>& cause, int generation, int max_restarts);

/// Formats the report as text that ends with a newline. Empty on success. `in_colour`: the lines that name the worker
/// to blame are red.
std::string describe_report(const LaunchReport& report, bool in_colour = false);
/// Formats the report as one line of JSON.
std::string report_to_json(const LaunchReport& report);

/// Encoding of worker ends for messages between nodes.
std::string pack_ends(const std::vector<WorkerEnd>& ends);
std::vector<WorkerEnd> unpack_ends(const std::string& packed);

}  // namespace lockstep
