#include "bench/run_bench.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>

#include <fmt/format.h>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "bench/collective_report.h"
#include "bench/ddp_report.h"
#include "bench/launch_ranks.h"
#include "bench/plot.h"
#include "bench/request.h"
#include "run/child_process.h"

namespace lockstep::bench {
namespace {

bool has_mpi(const std::vector<std::string>& backends) {
  return std::find(backends.begin(), backends.end(), "mpi") != backends.end();
}

/// Removes mpi from the backends if mpirun is missing. Throws UsageError if mpi was requested.
void leave_out_mpi(const Request& request, std::vector<std::string>& backends) {
  if (!has_mpi(backends)) return;
  if (has_mpi(request.backends)) require_mpirun("--backends");
  if (tool::has_mpirun() || !request.backends.empty()) return;
  std::cerr << fmt::format("lockstep bench: skipping mpi: {}\n", kNoMpirun);
  std::erase(backends, "mpi");
}

void check_memory(const CollectivePlan& plan, const tool::Machine& machine) {
  const auto needed = static_cast<uint64_t>(memory_bytes(plan));
  const auto usable = tool::usable_memory_bytes(machine);
  if (needed > usable)
    throw UsageError(
        fmt::format("the largest size needs up to {} on {} ranks, but only {} are free: use a smaller --max, fewer "
                    "ranks or fewer backends",
                    tool::format_bytes(needed), plan.ranks, tool::format_bytes(usable)));
}

/// Checks before measuring, which takes minutes.
void check_plot(const std::string& file, const CollectivePlan& plan) {
  if (plan.operation == Operation::kBarrier)
    throw UsageError("--plot draws time over size, but a barrier has no size: remove it");
  const auto folder = std::filesystem::absolute(file).parent_path();
  if (std::filesystem::is_directory(file)) throw UsageError(fmt::format("--plot is {}, a folder: name a file", file));
  if (::access(folder.c_str(), W_OK) != 0)
    throw UsageError(
        fmt::format("--plot is {}, but {} is not writable: {}", file, folder.string(), std::strerror(errno)));
}

void write_plot(const std::string& file, const std::vector<CollectiveRow>& rows, const CollectivePlan& plan,
                const std::string& where) {
  const std::string what = reduces(plan.operation) ? fmt::format("{} of {}", plan.redop, plan.dtype) : plan.dtype;
  std::ofstream stream(file);
  stream << plot_svg(rows, {fmt::format("{}, {}", name_of(plan.operation), what), where}) << std::flush;
  if (!stream) throw SystemError(fmt::format("cannot write {}: {}", file, std::strerror(errno)));
}

}  // namespace

int run_collective_bench(const BenchArguments& arguments) {
  RankOptions options{.command = {find_bench_program()}, .threads = arguments.threads};
  auto backends = query_backends(options.command[0]);
  leave_out_mpi(arguments.request, backends);
  CollectivePlan plan = make_collective_plan(arguments.request, backends);
  const auto machine = tool::read_machine();
  check_memory(plan, machine);
  decide_core_binding(plan, arguments, machine);
  options.by_mpirun = has_mpi(plan.backends);
  const auto where = describe_conditions(plan, arguments.threads, machine);
  if (!arguments.plot_file.empty()) check_plot(arguments.plot_file, plan);
  if (!arguments.json)
    std::cout << fmt::format("# lockstep {} bench {}: {}\n", LOCKSTEP_VERSION_STRING, name_of(plan.operation), where)
              << std::flush;

  CollectivePrinter printer(plan, {.json = arguments.json, .shows_progress = ::isatty(STDERR_FILENO) != 0}, std::cout,
                            std::cerr);
  const int code = run_ranks(
      plan, [&] { return to_text(plan); }, options,
      [&](const std::string& line) { printer.handle(collective_message_from(line)); });
  printer.finish();
  if (!arguments.plot_file.empty() && code == 0) write_plot(arguments.plot_file, printer.rows(), plan, where);
  return code == 0 && printer.has_wrong() ? kWrongResults : code;
}

int run_ddp_bench(const BenchArguments& arguments) {
  if (!arguments.plot_file.empty()) throw UsageError("--plot draws time over size, but ddp has no sizes: remove it");
  RankOptions options{.command = {find_bench_program(), "--ddp"}, .threads = arguments.threads};
  DdpPlan plan = make_ddp_plan(arguments.request, query_backends(options.command[0]));
  options.by_mpirun = plan.backend == "mpi";
  if (options.by_mpirun) require_mpirun("--backend");
  const auto machine = tool::read_machine();
  decide_core_binding(plan, arguments, machine);
  std::optional<Python> python;
  if (!arguments.request.against.empty()) python = find_python("Gloo", arguments.request.python);
  const auto store = SharedFile::in_memory();
  if (python) plan.python = python->program;
  plan.python_store = store.path();
  if (!arguments.json)
    std::cout << fmt::format("# lockstep {} bench {}: {}\n", LOCKSTEP_VERSION_STRING, kDdp,
                             describe_conditions(plan, arguments.threads, machine))
              << std::flush;
  if (!arguments.json && python)
    std::cout << fmt::format("# python: PyTorch {} of {}, DistributedDataParallel over Gloo\n", python->torch,
                             python->program)
              << std::flush;

  DdpPrinter printer(plan, {.json = arguments.json, .shows_progress = ::isatty(STDERR_FILENO) != 0}, std::cout,
                     std::cerr);
  const int code = run_ranks(
      plan, [&] { return to_text(plan); }, options,
      [&](const std::string& line) { printer.handle(ddp_message_from(line)); });
  printer.finish();
  return code == 0 && printer.has_wrong() ? kWrongResults : code;
}

}  // namespace lockstep::bench
