#include <cmath>
#include <memory>

#include <CLI/CLI.hpp>

#include <lockstep/launcher.h>

#include "cli/commands.h"

namespace {

constexpr const char* kAbout =
    "Start a program as several ranks, on one node or on several, and end all when one fails";

constexpr const char* kRunFooter = R"(
Options may be written with '_' for '-', as with torchrun.

Ctrl-C asks the workers to end, twice ends them at once. SIGTERM and SIGUSR1 are passed on.

Examples:
  lockstep run -n 4 ./train --epochs 3
  lockstep run -n gpu --max-restarts 3 --log-dir logs ./train
  lockstep run --nnodes 2 --node-rank 0 --master-addr node0 \
      --secret-file job.secret -n 4 ./train
  lockstep run -n 2 --dry-run ./train

Exit codes:
  0   every worker ended with exit code 0
  2   wrong usage: nothing was started
  3   a worker failed: the first to fail had an exit code, gave up or hung
  4   a worker was killed: the first to fail was ended by a signal
  5   a node did not come in time, or its launcher is gone
  6   preempted: the launcher was told to stop
  70  the system refused something, or an internal error
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
  run.add_option(
         "-n,--nproc-per-node", options.workers_per_node,
         "Workers on this node: a number, cpu (one per usable core), gpu (one per visible GPU), auto (gpu where "
         "there are any, else cpu)")
      ->type_name("N|cpu|gpu|auto")
      ->envname("PET_NPROC_PER_NODE")
      ->capture_default_str();
  run.add_option("--omp-threads", arguments.omp_threads,
                 "OMP_NUM_THREADS of each worker (else, where it is not set: usable cores / workers)")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  run.add_flag("--bind", options.bind, "Give each worker cores of its own");
  run.add_option("--role", options.role, "A name for the workers, in front of their lines and in ROLE_NAME")
      ->type_name("NAME")
      ->envname("PET_ROLE");
  run.add_flag("--local-rank-argument", options.pass_local_rank, "Also pass --local_rank=K to the program");
}

void add_nodes(CLI::App& run, RunArguments& arguments) {
  auto& options = arguments.options;
  run.option_defaults()->group("Nodes");
  run.add_option("--nnodes", options.nodes,
                 "How many nodes the job has; start this command on each (else what srun or mpirun says, else 1)")
      ->type_name("N")
      ->envname("PET_NNODES");
  run.add_option("--node-rank", options.node_rank,
                 "Which of them this is: node 0 has the store (else what srun, mpirun or Kubernetes says, else 0)")
      ->type_name("K")
      ->envname("PET_NODE_RANK");
  run.add_option(
         "--master-addr", options.master_addr,
         "Name or address of node 0 (else, on several nodes: MASTER_ADDR, or what srun says; on one: 127.0.0.1)")
      ->type_name("HOST")
      ->envname("PET_MASTER_ADDR");
  run.add_option("--master-port", options.master_port,
                 "Its port (else, on several nodes: MASTER_PORT, or one for the job under srun and mpirun, or 29500; "
                 "on one: any free one)")
      ->type_name("PORT")
      ->envname("PET_MASTER_PORT");
  run.add_flag("--standalone", options.standalone, "One node, at an address of its own choice")
      ->envname("PET_STANDALONE");
  run.add_option("--secret-file", options.secret_file,
                 "The job's secret: 32 bytes or more, mode 0600, the same on every node (one node: a fresh one)")
      ->type_name("FILE");
  run.add_option("--join-timeout", arguments.join_seconds, "How long to wait for the other nodes")
      ->type_name("SECONDS")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

void add_failures(CLI::App& run, RunArguments& arguments) {
  run.option_defaults()->group("Failures");
  run.add_option("--max-restarts", arguments.options.max_restarts,
                 "How often all workers are started again after a failure")
      ->type_name("N")
      ->envname("PET_MAX_RESTARTS")
      ->capture_default_str();
  run.add_option("--restart-delay", arguments.restart_seconds,
                 "How long to wait before the first restart; before each further one twice as long, up to a minute")
      ->type_name("SECONDS")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  run.add_option("--grace", arguments.grace_seconds, "How long workers have between SIGTERM and SIGKILL")
      ->type_name("SECONDS")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

void add_output(CLI::App& run, RunArguments& arguments) {
  auto& options = arguments.options;
  run.option_defaults()->group("Output");
  run.add_option("--log-dir", options.log_dir, "Write what workers print to ATTEMPT/RANK/stdout and stderr there, too")
      ->type_name("DIR")
      ->envname("PET_LOG_DIR");
  run.add_option("-r,--redirects", options.redirects,
                 "Streams that go to the files alone: 1 stdout, 2 stderr, 3 both (said without a value), or for each "
                 "local rank, as in 0:3,1:1")
      ->type_name("STREAMS")
      ->expected(0, 1)
      ->envname("PET_REDIRECTS");
  run.add_option("-t,--tee", options.tee, "Streams that go to the files and the console: the same, and the default")
      ->type_name("STREAMS")
      ->expected(0, 1)
      ->envname("PET_TEE");
  run.add_option("--local-ranks-filter", options.shown_ranks, "Show the output of these local ranks only, as in 0,1")
      ->type_name("RANKS")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->envname("PET_LOCAL_RANKS_FILTER");
  run.add_flag("--dry-run", options.dry_run, "Print what would be started, with its environment; start nothing");
  run.add_flag("--json", options.json,
               "The last line on stderr is the report as a JSON object; with --dry-run, the plan");
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
