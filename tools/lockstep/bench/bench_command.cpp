#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>
#include <lockstep/launcher.h>
#include <lockstep/version.h>

#include "bench/plot.h"
#include "bench/printer.h"
#include "bench/ranks.h"
#include "bench/request.h"
#include "commands.h"
#include "helper_program.h"
#include "machine.h"
#include "mpirun_command.h"
#include "run_program.h"

namespace lockstep::bench {
namespace {

constexpr const char* kProgram = "lockstep-bench";
constexpr int kWrongResults = 1;

constexpr const char* kFooter = R"(
Sizes are in bytes; K, M and G are powers of 1024. In each size the backends take turns, round by round, and their
results are compared element by element with what they should be. The columns are those of nccl-tests; floor is the part
of a time that memory and caches need in any case. Other programs that run meanwhile are measured, too.

Examples:
  lockstep bench all-reduce
  lockstep bench all-reduce --backends gloo -n 4 --sizes 4,64K,25M --json
  lockstep bench reduce-scatter --dtype bfloat16 --op avg --min 1M --max 64M \
      --plot times.svg

Exit codes:
  0   measured, and every result was right
  1   measured, but some results were wrong
  2   wrong usage: nothing was started
  3   a rank failed: the first to fail ended with an exit code
  4   a rank was killed: the first to fail was ended by a signal
  6   stopped by a signal
  70  the system refused something, or an internal error
)";

struct Arguments {
  Request request{};
  int threads = 1;
  bool no_bind = false;
  bool json = false;
  std::string plot_file{};
};

std::vector<std::string> ask_backends(const std::string& program) {
  const auto answer = tool::run_program({program, "--backends"}, std::chrono::seconds(60));
  if (!answer.failure.empty()) throw SystemError(fmt::format("{} {}", program, answer.failure));
  return nlohmann::json::parse(answer.output);
}

/// Without mpirun the ranks of mpi cannot be started: an error where it was asked for.
void require_mpirun(const Request& request, std::vector<std::string>& backends) {
  const auto mpi = std::find(backends.begin(), backends.end(), "mpi");
  const auto& asked = request.backends;
  const bool is_asked_for = std::find(asked.begin(), asked.end(), "mpi") != asked.end();
  if (mpi == backends.end() || tool::has_mpirun() || (!asked.empty() && !is_asked_for)) return;
  constexpr const char* kReason = "its ranks are started by mpirun, which is not in PATH (apt-get install openmpi-bin)";
  if (is_asked_for) throw UsageError(fmt::format("--backends: mpi cannot be measured: {}", kReason));
  std::cerr << fmt::format("lockstep bench: mpi is left out: {}\n", kReason);
  backends.erase(mpi);
}

void check_memory(const Plan& plan, const tool::Machine& machine) {
  const auto needed = static_cast<uint64_t>(memory_bytes(plan));
  const auto usable = tool::usable_memory_bytes(machine);
  if (needed > usable)
    throw UsageError(
        fmt::format("the largest size needs up to {} on {} ranks, but {} are free: give a smaller --max, "
                    "fewer ranks or fewer backends at once",
                    tool::bytes_in_words(needed), plan.ranks, tool::bytes_in_words(usable)));
}

std::string conditions(const Plan& plan, const RankOptions& options, const tool::Machine& machine) {
  return fmt::format("{} {} of {} {} on {} of {}, {}", plan.ranks, plan.ranks == 1 ? "rank" : "ranks", options.threads,
                     options.threads == 1 ? "thread" : "threads", fmt::format("{} cores", machine.allowed_cores),
                     machine.cpu_model, plan.bind ? "pinned" : "not pinned");
}

/// Before minutes of measuring.
void check_plot(const std::string& file, const Plan& plan) {
  if (plan.operation == Operation::kBarrier)
    throw UsageError("--plot draws time over size, but a barrier has no size: leave it out");
  const auto folder = std::filesystem::absolute(file).parent_path();
  if (std::filesystem::is_directory(file)) throw UsageError(fmt::format("--plot is {}, a folder: name a file", file));
  if (::access(folder.c_str(), W_OK) != 0)
    throw UsageError(
        fmt::format("--plot is {}, but nothing can be written to {}: {}", file, folder.string(), std::strerror(errno)));
}

void write_plot(const std::string& file, const std::vector<Row>& rows, const Plan& plan, const std::string& where) {
  const std::string what = reduces(plan.operation) ? fmt::format("{} of {}", plan.redop, plan.dtype) : plan.dtype;
  std::ofstream stream(file);
  stream << plot_svg(rows, {fmt::format("{}, {}", name_of(plan.operation), what), where}) << std::flush;
  if (!stream) throw SystemError(fmt::format("cannot write {}: {}", file, std::strerror(errno)));
}

int measure(const Arguments& arguments) {
  RankOptions options;
  options.program = tool::find_helper_program(kProgram).string();
  if (options.program.empty())
    throw SystemError(fmt::format("{} is neither beside lockstep nor in ../libexec/lockstep", kProgram));
  auto backends = ask_backends(options.program);
  require_mpirun(arguments.request, backends);
  Plan plan = make_plan(arguments.request, backends);
  const auto machine = tool::read_machine();
  check_memory(plan, machine);
  plan.is_crowded = plan.ranks > tool::usable_cores(machine);
  options.threads = arguments.threads;
  plan.bind = !arguments.no_bind && plan.ranks * arguments.threads <= machine.allowed_cores;
  const auto where = conditions(plan, options, machine);
  if (!arguments.plot_file.empty()) check_plot(arguments.plot_file, plan);
  if (!arguments.json)
    std::cout << fmt::format("# lockstep {} bench {}: {}\n", LOCKSTEP_VERSION_STRING, name_of(plan.operation), where)
              << std::flush;

  Printer printer(plan, {.json = arguments.json, .shows_progress = ::isatty(STDERR_FILENO) != 0}, std::cout, std::cerr);
  const int code = run_ranks(plan, options, [&](const Message& message) { printer.take(message); });
  printer.finish();
  if (!arguments.plot_file.empty() && code == 0) write_plot(arguments.plot_file, printer.rows(), plan, where);
  return code == 0 && printer.has_wrong() ? kWrongResults : code;
}

int run(const Arguments& arguments) try { return measure(arguments); } catch (const UsageError& error) {
  std::cerr << "lockstep bench: " << error.what() << "\n";
  return static_cast<int>(LaunchExit::kUsage);
} catch (const std::exception& error) {
  std::cerr << "lockstep bench: " << error.what() << "\n";
  return static_cast<int>(LaunchExit::kInternal);
}

std::string alternatives(const std::vector<std::string>& names) {
  return fmt::format("{}", fmt::join(names, "|"));
}

void add_message_options(CLI::App& command, Request& request) {
  command.add_option("operation", request.operation, "The collective to measure")
      ->required()
      ->type_name(alternatives(operation_names()));
  command.add_option("--min", request.least, "The smallest message")->type_name("BYTES")->default_str(kDefaultLeast);
  command.add_option("--max", request.most, "The largest message")->type_name("BYTES")->default_str(kDefaultMost);
  command.add_option("--factor", request.factor, "From one size to the next")
      ->check(CLI::PositiveNumber)
      ->default_str(std::to_string(kDefaultFactor));
  command.add_option("--sizes", request.sizes, "These sizes and no others, as in 4,1K,25M")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("BYTES,...")
      ->excludes("--min", "--max", "--factor");
  command.add_option("--dtype", request.dtype, "Of the elements")
      ->type_name(alternatives(dtype_names()))
      ->default_str(Plan().dtype);
  command.add_option("--op", request.redop, "How all-reduce and reduce-scatter reduce")
      ->type_name(alternatives(redop_names()))
      ->default_str(Plan().redop);
  command
      .add_option("--memory", request.memory,
                  "allocated: tensors from ProcessGroup::allocate; ordinary: LibTorch's own; both, where they differ")
      ->type_name("allocated|ordinary|both")
      ->default_str(name_of(Plan().memory));
}

void add_run_options(CLI::App& command, Arguments& arguments) {
  auto& request = arguments.request;
  command.add_option("-n,--nproc-per-node", request.ranks, "Ranks, all on this host")->capture_default_str();
  command.add_option("--backends", request.backends, "Backends that take turns, as in shm,gloo (all that there are)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...");
  command.add_option("--rounds", request.rounds, "Samples of each backend in each size (what fits into a minute)")
      ->check(CLI::PositiveNumber);
  command.add_option("--omp-threads", arguments.threads, "OMP_NUM_THREADS of each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_flag("--no-bind", arguments.no_bind, "Leave ranks free to move between cores, also where cores suffice");
  command.add_flag("--check,!--no-check", request.check, "Compare results with what they should be: the default");
  command.add_flag("--json", arguments.json, "Print one object a line");
  command.add_option("--plot", arguments.plot_file, "Draw time over size into this file, as SVG")->type_name("FILE");
}

}  // namespace
}  // namespace lockstep::bench

void add_bench(CLI::App& app, int& exit_code) {
  using lockstep::bench::Arguments;
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("bench", "Measure collectives: backends side by side, and how near to the floor");
  lockstep::bench::add_message_options(*command, arguments->request);
  lockstep::bench::add_run_options(*command, *arguments);
  command->footer(lockstep::bench::kFooter);
  command->callback([arguments, &exit_code] { exit_code = lockstep::bench::run(*arguments); });
}
