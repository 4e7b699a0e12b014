#include <unistd.h>

#include <iostream>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>
#include <lockstep/launcher.h>
#include <lockstep/version.h>

#include "bench/ranks.h"
#include "bench/request.h"
#include "bench/row.h"
#include "bench/sizes.h"
#include "bench/statistics.h"
#include "bench/table.h"
#include "commands.h"
#include "helper_program.h"
#include "machine.h"
#include "run_program.h"

namespace lockstep::bench {
namespace {

constexpr const char* kProgram = "lockstep-bench";
constexpr int kWrongResults = 1;

constexpr const char* kFooter = R"(
Sizes are in bytes; K, M and G are powers of 1024. In each size the backends take turns, round by round.
The columns are those of nccl-tests; floor says how near a time is to what memory and caches allow.

Examples:
  lockstep bench all-reduce
  lockstep bench all-reduce --backends gloo -n 4 --sizes 4,64K,25M --json
  lockstep bench reduce-scatter --dtype bfloat16 --op avg --min 1M --max 64M

Exit codes:
  0   measured, and every result was right
  1   measured, and some results were wrong
  2   wrong usage: nothing was started
  3 to 70, as of lockstep run: a rank failed, was killed, or the run was stopped
)";

struct Arguments {
  Request request{};
  int threads = 1;
  bool no_bind = false;
  bool json = false;
};

/// Prints what the ranks say, as they say it.
class Printer {
 public:
  Printer(const Plan& plan, bool json) : plan_(plan), json_(json), shows_progress_(::isatty(STDERR_FILENO) != 0) {}

  void operator()(const Message& message) {
    std::visit([this](const auto& kind) { take(kind); }, message);
  }

  void finish() {
    clear_progress();
    if (!json_) std::cout << ratio_table(rows_) << std::flush;
  }

  bool has_wrong() const {
    for (const auto& row : rows_)
      if (row.wrong.value_or(0) != 0) return true;
    return false;
  }

 private:
  void take(const Progress& progress) {
    if (!shows_progress_) return;
    ++sizes_begun_;
    std::cerr << fmt::format("\r\033[K{} {}: size {} of {}", name_of(plan_.operation), written_bytes(progress.bytes),
                             sizes_begun_, plan_.sizes.size())
              << std::flush;
  }

  void take(const RoundTrip& round_trip) {
    floor_.round_trip_us = median(round_trip.times_us);
    if (!json_)
      std::cout << fmt::format("# a flag from one rank to another and back: {:.3f} us\n", floor_.round_trip_us)
                << table_header() << std::flush;
  }

  void take(const Stream& stream) {
    floor_.bytes = stream.bytes;
    floor_.stream_us = median(stream.times_us);
  }

  void take(const Samples& samples) {
    clear_progress();
    rows_.push_back(make_row(plan_, samples, floor_));
    std::cout << (json_ ? to_json_line(rows_.back()) + "\n" : table_line(rows_.back())) << std::flush;
  }

  void clear_progress() {
    if (shows_progress_) std::cerr << "\r\033[K" << std::flush;
  }

  const Plan& plan_;
  const bool json_;
  const bool shows_progress_;
  size_t sizes_begun_ = 0;
  Floor floor_;
  std::vector<Row> rows_;
};

std::vector<std::string> ask_backends(const std::string& program) {
  const auto answer = tool::run_program({program, "--backends"}, std::chrono::seconds(60));
  if (!answer.failure.empty()) throw SystemError(fmt::format("{} {}", program, answer.failure));
  return nlohmann::json::parse(answer.output);
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

void print_heading(const Plan& plan, const RankOptions& options, const tool::Machine& machine) {
  std::cout << fmt::format("# lockstep {} bench {}: {} on {} ranks, {} {} a rank, {}, {} cores ({})\n",
                           LOCKSTEP_VERSION_STRING, name_of(plan.operation), fmt::join(plan.backends, ", "), plan.ranks,
                           options.threads, options.threads == 1 ? "thread" : "threads",
                           options.bind ? "pinned" : "not pinned", machine.allowed_cores, machine.cpu_model)
            << std::flush;
}

int measure(const Arguments& arguments) {
  RankOptions options;
  options.program = tool::find_helper_program(kProgram).string();
  if (options.program.empty())
    throw SystemError(fmt::format("{} is neither beside lockstep nor in ../libexec/lockstep", kProgram));
  Plan plan = make_plan(arguments.request, ask_backends(options.program));
  const auto machine = tool::read_machine();
  check_memory(plan, machine);
  plan.is_crowded = plan.ranks > tool::usable_cores(machine);
  options.threads = arguments.threads;
  options.bind = !arguments.no_bind && plan.ranks <= machine.allowed_cores;
  if (!arguments.json) print_heading(plan, options, machine);

  Printer printer(plan, arguments.json);
  const int code = run_ranks(plan, options, [&](const Message& message) { printer(message); });
  printer.finish();
  return code == 0 && printer.has_wrong() ? kWrongResults : code;
}

int run(const Arguments& arguments) try { return measure(arguments); } catch (const UsageError& error) {
  std::cerr << "lockstep bench: " << error.what() << "\n";
  return static_cast<int>(LaunchExit::kUsage);
} catch (const std::exception& error) {
  std::cerr << "lockstep bench: " << error.what() << "\n";
  return static_cast<int>(LaunchExit::kInternal);
}

void add_message_options(CLI::App& command, Request& request) {
  command.add_option("operation", request.operation, fmt::format("{}", fmt::join(operation_names(), ", ")))
      ->required()
      ->type_name("OPERATION");
  command.add_option("--min", request.least, "The smallest message")->type_name("BYTES")->capture_default_str();
  command.add_option("--max", request.most, "The largest message")->type_name("BYTES")->capture_default_str();
  command.add_option("--factor", request.factor, "From one size to the next")->capture_default_str();
  command.add_option("--sizes", request.sizes, "These sizes and no others, as in 4,1K,25M")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("BYTES,...")
      ->excludes("--min", "--max", "--factor");
  command.add_option("--dtype", request.dtype, fmt::format("{}", fmt::join(dtype_names(), ", ")))
      ->capture_default_str()
      ->type_name("NAME");
  command.add_option("--op", request.redop, fmt::format("How values are reduced: {}", fmt::join(redop_names(), ", ")))
      ->capture_default_str()
      ->type_name("NAME");
}

void add_run_options(CLI::App& command, Arguments& arguments) {
  auto& request = arguments.request;
  command.add_option("-n,--nproc-per-node", request.ranks, "Ranks, all on this host")->capture_default_str();
  command.add_option("--backends", request.backends, "Backends to compare, the first with each other (all there are)")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("NAME,...");
  command.add_option("--memory", request.memory, "allocated: tensors from ProcessGroup::allocate; ordinary; both")
      ->capture_default_str()
      ->type_name("KIND");
  command.add_option("--rounds", request.rounds, "Samples of each backend in each size (what fits into a minute)");
  command.add_option("--omp-threads", arguments.threads, "OMP_NUM_THREADS of each rank")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command.add_flag("--no-bind", arguments.no_bind, "Leave ranks free to move between cores");
  command.add_flag("--check,!--no-check", arguments.request.check,
                   "Compare every element with what it should be (the default)");
  command.add_flag("--json", arguments.json, "Print one object a line");
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
