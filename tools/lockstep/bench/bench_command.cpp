#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

#include <lockstep/error.h>
#include <lockstep/launcher.h>

#include "bench/rank_protocol.h"
#include "bench/request.h"
#include "bench/run_bench.h"
#include "cli/commands.h"

namespace lockstep::bench {
namespace {

constexpr const char* kBenchFooter = R"(
Sizes are in bytes; K, M and G are powers of 1024. In each size the backends take turns, round by round, and their
results are compared element by element with what they should be. The columns are those of nccl-tests; floor is the part
of a time that memory and caches need in any case. Other programs that run meanwhile are measured, too.

ddp measures a step of training: of ranks that do not talk (local), with DistributedDataParallel (ddp), of one rank while
the others sleep (alone) and, if asked for, with Python's DistributedDataParallel over Gloo (python). It prints what
talking adds to a step (exposed), and what is left of a rank's speed when all train together (efficiency).

gpu measures a step of one rank on one GPU: of the module by itself (plain), with DistributedDataParallel over NCCL
(ddp), that as a CapturedStep (captured), and, if asked for, the same in Python (python plain, python graph, which is
plain as a CUDA graph, python ddp, and python best with the settings that cost least).

Examples:
  lockstep bench all-reduce
  lockstep bench all-reduce --backends gloo -n 4 --sizes 4,64K,25M --json
  lockstep bench reduce-scatter --dtype bfloat16 --op avg --min 1M --max 64M \
      --plot times.svg
  lockstep bench ddp -n 2 --models cnn,mlp --against python
  lockstep bench gpu --against python --json

Exit codes:
  0   measured, and every result was right
  1   measured, but some results were wrong
  2   wrong usage: nothing was started
  3   a rank failed: the first to fail ended with an exit code
  4   a rank was killed: the first to fail was ended by a signal
  6   stopped by a signal
  70  the system refused something, or an internal error
)";

int run(const BenchArguments& arguments) try {
  if (arguments.request.operation == kDdp) return run_ddp_bench(arguments);
  if (arguments.request.operation == kGpu) return run_gpu_bench(arguments);
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
      .add_option("operation", request.operation, "The collective to measure; ddp: a step of training; gpu: on a GPU")
      ->required()
      ->type_name(alternatives(operation_names()));
  command.add_option("-n,--nproc-per-node", request.ranks, "Ranks, all on this host")
      ->default_str(std::to_string(kDefaultRanks));
  command
      .add_option("--rounds", request.rounds,
                  "Samples of each backend in each size, of each side of each model (what fits into a minute)")
      ->check(CLI::PositiveNumber);
  command.add_option("--omp-threads", arguments.threads, "OMP_NUM_THREADS of each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_flag("--no-bind", arguments.no_bind, "Leave ranks free to move between cores, also where cores suffice");
  command.add_flag("--check,!--no-check", request.check, "Compare results with what they should be: the default");
  command.add_flag("--json", arguments.json, "Print one object a line");
}

void add_message_options(CLI::App& command, BenchArguments& arguments) {
  constexpr const char* kGroup = "Options of collectives";
  auto& request = arguments.request;
  command.add_option("--backends", request.backends, "Backends that take turns, as in shm,gloo (all that there are)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...")
      ->group(kGroup);
  command.add_option("--min", request.min_size, "The smallest message")
      ->type_name("BYTES")
      ->default_str(kDefaultMin)
      ->group(kGroup);
  command.add_option("--max", request.max_size, "The largest message")
      ->type_name("BYTES")
      ->default_str(kDefaultMax)
      ->group(kGroup);
  command.add_option("--factor", request.factor, "From one size to the next")
      ->check(CLI::PositiveNumber)
      ->default_str(std::to_string(kDefaultFactor))
      ->group(kGroup);
  command.add_option("--sizes", request.sizes, "These sizes and no others, as in 4,1K,25M")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("BYTES,...")
      ->excludes("--min", "--max", "--factor")
      ->group(kGroup);
  command.add_option("--dtype", request.dtype, "Of the elements")
      ->type_name(alternatives(dtype_names()))
      ->default_str(CollectivePlan().dtype)
      ->group(kGroup);
  command.add_option("--op", request.redop, "How all-reduce and reduce-scatter reduce")
      ->type_name(alternatives(redop_names()))
      ->default_str(CollectivePlan().redop)
      ->group(kGroup);
  command
      .add_option("--memory", request.memory,
                  "allocated: tensors from ProcessGroup::allocate; ordinary: LibTorch's own; both, where they differ")
      ->type_name("allocated|ordinary|both")
      ->default_str(name_of(CollectivePlan().memory))
      ->group(kGroup);
  command.add_option("--plot", arguments.plot_file, "Draw time over size into this file, as SVG")
      ->type_name("FILE")
      ->group(kGroup);
}

void add_ddp_options(CLI::App& command, Request& request) {
  constexpr const char* kGroup = "Options of ddp and gpu";
  command
      .add_option("--models", request.models,
                  fmt::format("Models to train, as in {}: the default; gpu: {}", fmt::join(model_names(), ","),
                              fmt::join(gpu_model_names(), ",")))
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...")
      ->group(kGroup);
  command.add_option("--backend", request.backend, "Over which ddp averages gradients")
      ->type_name("NAME")
      ->default_str(DdpPlan().backend)
      ->group(kGroup);
  command.add_option("--against", request.against, "Compare with PyTorch's own, where a python3 has torch")
      ->type_name("python")
      ->group(kGroup);
}

}  // namespace
}  // namespace lockstep::bench

void add_bench(CLI::App& app, int& exit_code) {
  using lockstep::bench::BenchArguments;
  auto arguments = std::make_shared<BenchArguments>();
  auto* command =
      app.add_subcommand("bench", "Measure collectives, backends side by side, and what a step of training costs");
  lockstep::bench::add_run_options(*command, *arguments);
  lockstep::bench::add_message_options(*command, *arguments);
  lockstep::bench::add_ddp_options(*command, arguments->request);
  command->footer(lockstep::bench::kBenchFooter);
  command->callback([arguments, &exit_code] { exit_code = lockstep::bench::run(*arguments); });
}
