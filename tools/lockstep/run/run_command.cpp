#include <cmath>
#include <memory>

#include <CLI/CLI.hpp>

#include <lockstep/launcher.h>

#include "cli/commands.h"
#include "cli/seconds.h"

namespace {

constexpr const char* kAbout =
    "Start a program as several ranks, on one or more nodes, and stop all ranks if one fails";

constexpr const char* kRunFooter = R"(
Option names may contain '_' instead of '-', as with torchrun.

Ctrl-C asks the workers to stop; a second Ctrl-C kills them. SIGTERM and SIGUSR1 are forwarded to the workers.

Examples:
  lockstep run -n 4 ./train --epochs 3
  lockstep run -n gpu --max-restarts 3 --log-dir logs ./train
  lockstep run --nnodes 2 --node-rank 0 --master-addr node0 \
      --secret-file job.secret -n 4 ./train
  lockstep run -n 2 --dry-run ./train

Exit codes:
  0   every worker exited with code 0
  2   wrong usage: nothing was started
  3   a worker failed: the first to fail exited, gave up or hung
  4   a worker was killed: the first to fail was killed by a signal
  5   a node did not join in time, or its launcher is gone
  6   preempted: the launcher was asked to stop
  70  a system call failed, or an internal error
)";

struct RunArguments {
  lockstep::LaunchOptions options;
  double grace_seconds = 30, join_seconds = 300, restart_seconds = 1;
  int omp_threads = 0;
  std::vector<std::string> program;  // for the help text only
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(std::llround(seconds * 1000)));
}

void add_workers(CLI::App& run, RunArguments& arguments) {
  auto& options = arguments.options;
  run.option_defaults()->group("Workers");
  run.add_option("-n,--nproc-per-node", options.workers_per_node,
                 "Workers on this node: a number, cpu (one per usable core), gpu (one per visible GPU), auto (gpu if "
                 "there are any, else cpu)")
      ->type_name("N|cpu|gpu|auto")
      ->envname("PET_NPROC_PER_NODE")
      ->capture_default_str();
  run.add_option("--omp-threads", arguments.omp_threads,
                 "OMP_NUM_THREADS of each worker (default, if not set in the environment: usable cores / workers)")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  run.add_flag("--bind", options.bind, "Pin each worker to its own cores");
  run.add_option("--role", options.role, "A name for the workers, shown before their output and set as ROLE_NAME")
      ->type_name("NAME")
      ->envname("PET_ROLE");
  run.add_flag("--local-rank-argument", options.pass_local_rank, "Also pass --local_rank=K to the program");
}

void add_nodes(CLI::App& run, RunArguments& arguments) {
  auto& options = arguments.options;
  run.option_defaults()->group("Nodes");
  run.add_option("--nnodes", options.nodes,
                 "Number of nodes; start this command on each of them (default: as set by srun or mpirun, else 1)")
      ->type_name("N")
      ->envname("PET_NNODES");
  run.add_option("--node-rank", options.node_rank,
                 "Rank of this node; node 0 hosts the store (default: as set by srun, mpirun or Kubernetes, else 0)")
      ->type_name("K")
      ->envname("PET_NODE_RANK");
  run.add_option("--master-addr", options.master_addr,
                 "Name or address of node 0 (default: MASTER_ADDR or as set by srun; on a single node 127.0.0.1)")
      ->type_name("HOST")
      ->envname("PET_MASTER_ADDR");
  run.add_option("--master-port", options.master_port,
                 "Port of the store on node 0 (default: MASTER_PORT, or derived from the job under srun and mpirun, or "
                 "29500; on a single node any free port)")
      ->type_name("PORT")
      ->envname("PET_MASTER_PORT");
  run.add_flag("--standalone", options.standalone, "Run on one node with an automatically chosen address and port")
      ->envname("PET_STANDALONE");
  run.add_option("--secret-file", options.secret_file,
                 "File with the job's secret: 32 bytes or more, mode 0600, the same on every node (default on a single "
                 "node: a new random secret)")
      ->type_name("FILE");
  run.add_option("--join-timeout", arguments.join_seconds, "How long to wait for the other nodes")
      ->type_name("SECONDS")
      ->check(is_seconds())
      ->capture_default_str();
}

void add_failures(CLI::App& run, RunArguments& arguments) {
  run.option_defaults()->group("Failures");
  run.add_option("--max-restarts", arguments.options.max_restarts, "How often to restart all workers after a failure")
      ->type_name("N")
      ->envname("PET_MAX_RESTARTS")
      ->capture_default_str();
  run.add_option("--restart-delay", arguments.restart_seconds,
                 "Delay before the first restart; doubles with each restart, up to a minute")
      ->type_name("SECONDS")
      ->check(is_seconds())
      ->capture_default_str();
  run.add_option("--grace", arguments.grace_seconds, "Time between SIGTERM and SIGKILL when stopping workers")
      ->type_name("SECONDS")
      ->check(is_seconds())
      ->capture_default_str();
}

void add_output(CLI::App& run, RunArguments& arguments) {
  auto& options = arguments.options;
  run.option_defaults()->group("Output");
  run.add_option("--log-dir", options.log_dir,
                 "Also write the output of workers to ATTEMPT/RANK/stdout and stderr in this folder")
      ->type_name("DIR")
      ->envname("PET_LOG_DIR");
  run.add_option("-r,--redirects", options.redirects,
                 "Streams to write only to the files: 1 stdout, 2 stderr, 3 both (also if no value is given), or per "
                 "local rank, as in 0:3,1:1")
      ->type_name("STREAMS")
      ->expected(0, 1)
      ->envname("PET_REDIRECTS");
  run.add_option("-t,--tee", options.tee,
                 "Streams to write to the files and the console: values as for --redirects; this is the default for "
                 "all streams")
      ->type_name("STREAMS")
      ->expected(0, 1)
      ->envname("PET_TEE");
  run.add_option("--local-ranks-filter", options.shown_ranks, "Show the output of these local ranks only, as in 0,1")
      ->type_name("RANKS")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->envname("PET_LOCAL_RANKS_FILTER");
  run.add_flag("--dry-run", options.dry_run, "Print the commands and their environment without starting them");
  run.add_flag("--json", options.json,
               "Print the report as a JSON object in the last line on stderr; with --dry-run, print the plan as JSON");
}

}  // namespace

void add_run(CLI::App& app, const std::vector<std::string>& program, int& exit_code) {
  auto arguments = std::make_shared<RunArguments>();
  auto* run = app.add_subcommand("run", kAbout);
  run->footer(kRunFooter);
  add_workers(*run, *arguments);
  add_nodes(*run, *arguments);
  add_failures(*run, *arguments);
  add_output(*run, *arguments);
  run->add_option("program", arguments->program, "The program to start, and its arguments");
  run->callback([arguments, run, &program, &exit_code] {
    auto options = arguments->options;
    options.command = program;
    options.grace = milliseconds(arguments->grace_seconds);
    options.join_timeout = milliseconds(arguments->join_seconds);
    options.restart_delay = milliseconds(arguments->restart_seconds);
    if (run->count("--omp-threads") > 0) options.omp_threads = arguments->omp_threads;
    exit_code = lockstep::launch(options);
  });
}
