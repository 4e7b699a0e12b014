#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/export.h>

namespace lockstep {

/// What launch() returns, and `lockstep run` exits with.
enum class LaunchExit : int {
  kSuccess = 0,       // every worker ended with exit code 0
  kUsage = 2,         // the options make no sense, or the program cannot be found; nothing was started
  kWorkerFailed = 3,  // the worker to blame ended with an exit code, or gave up or hung until it was stopped
  kWorkerKilled = 4,  // the worker to blame was ended by a signal: a crash, an abort, a kill, out of memory
  kTimedOut = 5,      // a node did not come in time, or its launcher is gone
  kPreempted = 6,     // the launcher was told to stop: SIGTERM, SIGUSR1, SIGHUP or Ctrl-C
  kInternal = 70,     // the system refused something, or the launcher itself is broken
};

/// What `lockstep run` is asked for. A plain value.
struct LOCKSTEP_EXPORT LaunchOptions {
  std::vector<std::string> command;    ///< the program and its arguments
  std::string workers_per_node = "1";  ///< a number; "cpu": the usable cores; "gpu": the visible GPUs; "auto": GPUs
                                       ///< where there are any, else cores
  // What is left open among these four is taken from srun, mpirun or Kubernetes: docs/multi_node.md.
  std::optional<int> nodes;      ///< none: as many as srun or mpirun started launchers, else 1
  std::optional<int> node_rank;  ///< 0 to nodes - 1; node 0 has the store and decides
  std::string master_addr;       ///< the name or address of node 0; empty: loopback on one node
  int master_port = 0;           ///< 0: the system chooses on one node; on several one for the job, else 29500
  bool standalone = false;       ///< one node, on loopback, at a port that the system chooses

  int max_restarts = 0;                                        ///< of all workers, after one failed
  std::chrono::milliseconds restart_delay{1000};               ///< before the first restart; then twice as long each
  std::chrono::milliseconds grace = std::chrono::seconds(30);  ///< between asking workers to end and SIGKILL
  std::chrono::milliseconds join_timeout{std::chrono::minutes(5)};  ///< for the other nodes to come

  std::string log_dir;             ///< files ATTEMPT/RANK/stdout and stderr there; empty: none
  std::string tee;                 ///< which streams go to the console and the files: "1" stdout, "2" stderr, "3"
                                   ///< both, "0" none, or for each local rank as in "0:3,1:1". The default for all
  std::string redirects;           ///< the same for streams that go to the files alone
  std::vector<int> shown_ranks;    ///< the local ranks whose output the console shows; empty: all
  std::string role;                ///< a name for the workers: in the prefix of lines, and in ROLE_NAME
  std::optional<int> omp_threads;  ///< OMP_NUM_THREADS; none: usable cores / workers, where it is not set already
  bool bind = false;               ///< give each worker cores of its own
  bool pass_local_rank = false;    ///< append --local_rank=K to the arguments
  std::string secret_file;         ///< the job's secret; empty: LOCKSTEP_SECRET_FILE, else a fresh one (one node only)

  bool dry_run = false;  ///< print what would be started, and start nothing
  bool json = false;     ///< the plan, or the report as the last line of stderr, as one JSON object
};

/// Starts the workers of this node, hosts the job's store on node 0, passes their output on, and returns a LaunchExit
/// when all have ended. Nothing it started outlives it, nor this process, however either ends. Says on stderr what went
/// wrong; does not throw.
///
/// For a program whose main() begins with run_as_warden, and in a process that has no other child processes and no
/// handlers of its own for the signals it takes: INT, TERM, HUP, USR1 and TSTP. Not thread-safe.
LOCKSTEP_EXPORT int launch(const LaunchOptions& options);

/// The first line of a launcher's main(). The launcher starts itself once more to watch over its workers; in that
/// process this returns the exit code, after all work is done. None in any other.
LOCKSTEP_EXPORT std::optional<int> run_as_warden(int argc, char** argv);

}  // namespace lockstep
