#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <lockstep/error.h>
#include <lockstep/launcher.h>

#include "bench/operation.h"
#include "bench/rank_protocol.h"
#include "bench/request.h"
#include "bench/run_bench.h"
#include "cli/commands.h"
#include "doctor/machine.h"

namespace lockstep::bench {
namespace {

constexpr const char* kBenchFooter = R"(
Sizes are in bytes; K, M and G are powers of 1024. For each size the backends take turns, round by round, and every
element of their results is checked. The columns are those of nccl-tests; floor is the part of the time that memory and
caches need in any case. Other programs that run at the same time affect the results.

ddp measures a training step: of ranks that do not communicate (local), with DistributedDataParallel (ddp), of one rank
while the others sleep (alone) and, with --against python, with PyTorch's DistributedDataParallel over Gloo (python). It
prints the time that communication adds to a step (exposed) and the speed of a rank when all ranks train, relative to a
rank that trains alone (efficiency). With --optimizer adamw it also measures ranks that share their parameters and
update them during backward (shared).

gpu measures a training step of one rank on one GPU: of the module alone (plain), with DistributedDataParallel over NCCL
(ddp), as a CapturedStep (captured) and, with --against python, the same in Python: python plain, python graph (plain as a
CUDA graph), python ddp, and python best (ddp with the fastest settings). With --compile, also the models compiled with
their loss by lockstep compile, with DistributedDataParallel (compiled, and as a CapturedStep: compiled captured), and by
torch.compile, without, in these modes: default, reduce-overhead, max-autotune.

checkpoint measures saving and loading a model with its AdamW, and the time that an asynchronous save blocks, relative to
a copy in memory; with --against python, also torch.save and torch.load. Files are removed at the end.

Examples:
  lockstep bench all-reduce
  lockstep bench all-reduce --backends gloo -n 4 --sizes 4,64K,25M --json
  lockstep bench reduce-scatter --dtype bfloat16 --op avg --min 1M --max 64M \
      --plot times.svg
  lockstep bench ddp -n 2 --models cnn,mlp --against python
  lockstep bench gpu --against python --json
  lockstep bench gpu --against python --compile default,reduce-overhead \
      --models gpt-6x384
  lockstep bench checkpoint --bytes 4G --folder /data --against python

Exit codes:
  0   measured, and all results are correct
  1   measured, but some results are wrong
  2   wrong usage: nothing was started
  3   a rank failed: the first to fail exited
  4   a rank was killed: the first to fail was killed by a signal
  6   stopped by a signal
  70  a system call failed, or an internal error
)";

int run(BenchArguments arguments) try {
  if (arguments.threads == 0)
    arguments.threads = arguments.request.operation == kCheckpoint ? tool::read_machine().allowed_cores : 1;
  if (arguments.request.operation == kDdp) return run_ddp_bench(arguments);
  if (arguments.request.operation == kGpu) return run_gpu_bench(arguments);
  if (arguments.request.operation == kCheckpoint) return run_checkpoint_bench(arguments);
  return run_collective_bench(arguments);
} catch (const PeerError& error) {
  std::cerr << "lockstep bench: " << error.what() << "\n";
  return static_cast<int>(LaunchExit::kWorkerFailed);
} catch (const UsageError& error) {
  std::cerr << "lockstep bench: " << error.what() << "\n";
  return static_cast<int>(LaunchExit::kUsage);
} catch (const std::exception& error) {
  std::cerr << "lockstep bench: " << error.what() << "\n";
  return static_cast<int>(LaunchExit::kInternal);
}

std::string alternatives(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, "|"));
}

void add_run_options(CLI::App& command, BenchArguments& arguments) {
  auto& request = arguments.request;
  command
      .add_option("operation", request.operation,
                  "The collective to measure; ddp or gpu for a training step on CPUs or a GPU; checkpoint for files")
      ->required()
      ->type_name(alternatives(operation_names()));
  command.add_option("-n,--nproc-per-node", request.ranks, "Number of ranks, all on this host")
      ->default_str(std::to_string(kDefaultRanks));
  command
      .add_option("--rounds", request.rounds,
                  "Samples of each backend per size, or of each side per model (default: as many as fit into a minute)")
      ->check(CLI::PositiveNumber);
  command
      .add_option("--omp-threads", arguments.threads,
                  "OMP_NUM_THREADS of each rank (default: 1; checkpoint: all cores)")
      ->check(CLI::PositiveNumber);
  command.add_flag("--no-bind", arguments.no_bind, "Do not pin ranks to cores");
  command.add_flag("--check,!--no-check", request.check, "Check the results (default)");
  command.add_flag("--json", arguments.json, "Print one JSON object per line");
}

void add_message_options(CLI::App& command, BenchArguments& arguments) {
  constexpr const char* kGroup = "Options of collectives";
  auto& request = arguments.request;
  command
      .add_option("--backends", request.backends, "Backends to compare, as in shm,gloo (default: all of this build)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...")
      ->group(kGroup);
  command.add_option("--min", request.min_size, "Smallest message")
      ->type_name("BYTES")
      ->default_str(kDefaultMin)
      ->group(kGroup);
  command.add_option("--max", request.max_size, "Largest message")
      ->type_name("BYTES")
      ->default_str(kDefaultMax)
      ->group(kGroup);
  command.add_option("--factor", request.factor, "Factor from one size to the next")
      ->check(CLI::PositiveNumber)
      ->default_str(std::to_string(kDefaultFactor))
      ->group(kGroup);
  command.add_option("--sizes", request.sizes, "Measure only these sizes, as in 4,1K,25M")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("BYTES,...")
      ->excludes("--min", "--max", "--factor")
      ->group(kGroup);
  command.add_option("--dtype", request.dtype, "Type of the elements")
      ->type_name(alternatives(dtype_names()))
      ->default_str(CollectivePlan().dtype)
      ->group(kGroup);
  command.add_option("--op", request.redop, "Reduction of all-reduce and reduce-scatter")
      ->type_name(alternatives(redop_names()))
      ->default_str(CollectivePlan().redop)
      ->group(kGroup);
  command
      .add_option(
          "--memory", request.memory,
          "allocated: tensors from ProcessGroup::allocate; ordinary: LibTorch's allocator; both: both, if they differ")
      ->type_name("allocated|ordinary|both")
      ->default_str(name_of(CollectivePlan().memory))
      ->group(kGroup);
  command.add_option("--plot", arguments.plot_file, "Plot time over size into this SVG file")
      ->type_name("FILE")
      ->group(kGroup);
}

void add_ddp_options(CLI::App& command, Request& request) {
  constexpr const char* kGroup = "Options of ddp, gpu and checkpoint";
  command
      .add_option("--models", request.models,
                  fmt::format("Models to train (default for ddp: {}; for gpu: {})", fmt::join(model_names(), ","),
                              fmt::join(gpu_model_names(), ",")))
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...")
      ->group(kGroup);
  command.add_option("--backend", request.backend, "Backend of ddp")
      ->type_name("NAME")
      ->default_str(DdpPlan().backend)
      ->group(kGroup);
  command.add_option("--optimizer", request.optimizer, "Optimizer of ddp; adamw also measures shared parameters")
      ->type_name("sgd|adamw")
      ->default_str(DdpPlan().optimizer)
      ->group(kGroup);
  command.add_option("--against", request.against, "Compare with PyTorch in Python; needs a python3 that has torch")
      ->type_name("python")
      ->group(kGroup);
  command
      .add_option("--compile", request.compile_modes,
                  "gpu: also measure compiled models, against these modes of torch.compile. max-autotune takes minutes")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("MODE,...")
      ->group(kGroup);
  command.add_option("--python", request.python, "The interpreter for --against (default: the first that has torch)")
      ->type_name("PATH")
      ->group(kGroup);
}

void add_checkpoint_options(CLI::App& command, Request& request) {
  constexpr const char* kGroup = "Options of checkpoint";
  command.add_option("--bytes", request.bytes, "Size of the parameters; AdamW's state has twice as much")
      ->type_name("BYTES")
      ->default_str(kDefaultStateBytes)
      ->group(kGroup);
  command.add_option("--folder", request.folder, "Where to save (default: the current folder)")
      ->type_name("DIR")
      ->group(kGroup);
}

}  // namespace
}  // namespace lockstep::bench

void add_bench(CLI::App& app, int& exit_code) {
  using lockstep::bench::BenchArguments;
  auto arguments = std::make_shared<BenchArguments>();
  auto* command = app.add_subcommand("bench", "Measure collectives of all backends, training steps and checkpoints");
  lockstep::bench::add_run_options(*command, *arguments);
  lockstep::bench::add_message_options(*command, *arguments);
  lockstep::bench::add_ddp_options(*command, arguments->request);
  lockstep::bench::add_checkpoint_options(*command, arguments->request);
  command->footer(lockstep::bench::kBenchFooter);
  command->callback([arguments, &exit_code] { exit_code = lockstep::bench::run(*arguments); });
}
