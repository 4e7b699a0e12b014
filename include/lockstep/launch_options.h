#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/export.h>

namespace lockstep {

/// Return values of launch() and exit codes of `lockstep run`. "The worker to blame" is the worker whose failure caused
/// the failures of the others.
enum class LaunchExit : int {
  kSuccess = 0,       ///< every worker exited with code 0
  kUsage = 2,         ///< invalid options, program not found, or nodes that disagree; no worker was started
  kWorkerFailed = 3,  ///< the worker to blame exited with a nonzero code, or gave up or hung and was stopped
  kWorkerKilled = 4,  ///< the worker to blame was killed by a signal: crash, abort, kill, out of memory
  kTimedOut = 5,      ///< a node did not join in time, or its launcher is gone
  kPreempted = 6,     ///< the launcher got SIGTERM, SIGUSR1, SIGHUP or Ctrl-C, or the workers ended with this code
                      ///< (PreemptionGuard) and no restart was left
  kInternal = 70,     ///< a system call failed, or the launcher has a bug
};

/// The options of `lockstep run`. A plain value.
struct LOCKSTEP_EXPORT LaunchOptions {
  std::vector<std::string> command;    ///< the program and its arguments
  std::string workers_per_node = "1";  ///< a number; "cpu": the usable cores; "gpu": the visible GPUs; "auto": the
                                       ///< GPUs if there are any, else the cores
  // If nodes, node_rank, master_addr or master_port is not set, srun, mpirun or Kubernetes provides it
  // (docs/multi_node.md).
  std::optional<int> nodes;      ///< default: the number of launchers that srun or mpirun started, else 1
  std::optional<int> node_rank;  ///< 0 to nodes - 1; node 0 hosts the store and decides for all nodes
  std::string master_addr;       ///< name or address of node 0; default on one node: loopback
  int master_port = 0;           ///< 0 on one node: any free port; 0 on several: derived from the job, else 29500
  bool standalone = false;       ///< one node, on loopback, on any free port

  int max_restarts = 0;                           ///< how often all workers are restarted after a failure
  std::chrono::milliseconds restart_delay{1000};  ///< before the first restart; doubles each time, up to 1 minute
  std::chrono::milliseconds grace = std::chrono::seconds(30);       ///< from asking workers to exit until SIGKILL
  std::chrono::milliseconds join_timeout{std::chrono::minutes(5)};  ///< for the other nodes to join

  std::string log_dir;             ///< directory for ATTEMPT/RANK/stdout and stderr; empty: no log files
  std::string tee;                 ///< streams for both console and files, even if listed in `redirects`: "1" stdout,
                                   ///< "2" stderr, "3" both, "0" none, or for each local rank, as in "0:3,1:1"
  std::string redirects;           ///< streams for the files only, in the same format; default: none
  std::vector<int> shown_ranks;    ///< local ranks whose output appears on the console; empty: all
  std::string role;                ///< a name for the workers, in the prefix of lines and in ROLE_NAME
  std::optional<int> omp_threads;  ///< OMP_NUM_THREADS; default: usable cores / workers, unless already set
  bool bind = false;               ///< bind each worker to its own cores
  bool pass_local_rank = false;    ///< append --local_rank=K to the arguments
  std::string secret_file;         ///< the job's secret; empty: LOCKSTEP_SECRET_FILE, else generated (one node only)

  bool dry_run = false;  ///< print the workers' commands and environments, start nothing
  bool json = false;     ///< print the dry run's plan, or the report on the last line of stderr, as a JSON object
};

}  // namespace lockstep
