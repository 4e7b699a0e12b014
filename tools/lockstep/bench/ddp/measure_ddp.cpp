#include <unistd.h>

#include <iostream>
#include <optional>

#include <fmt/format.h>

#include <lockstep/error.h>
#include <lockstep/version.h>

#include "bench/conditions.h"
#include "bench/ddp/printer.h"
#include "bench/ddp/request.h"
#include "bench/measure.h"
#include "bench/python.h"
#include "bench/ranks.h"
#include "bench/shared_file.h"

namespace lockstep::bench {

int measure_ddp(const Arguments& arguments) {
  if (!arguments.plot_file.empty()) throw UsageError("--plot draws time over size, but ddp has no sizes: leave it out");
  RankOptions options{.command = {find_program(), "--ddp"}, .threads = arguments.threads};
  DdpPlan plan = make_ddp_plan(arguments.request, ask_backends(options.command[0]));
  options.by_mpirun = plan.backend == "mpi";
  if (options.by_mpirun) require_mpirun("--backend");
  const auto machine = tool::read_machine();
  settle_on_cores(plan, arguments, machine);
  std::optional<Python> python;
  if (!arguments.request.against.empty()) python = find_python("Gloo");
  const auto store = SharedFile::in_memory();
  if (python) plan.python = python->program;
  plan.python_store = store.path();
  if (!arguments.json)
    std::cout << fmt::format("# lockstep {} bench {}: {}\n", LOCKSTEP_VERSION_STRING, kDdp,
                             describe_conditions(plan, arguments.threads, machine))
              << std::flush;
  if (!arguments.json && python)
    std::cout << fmt::format("# python: PyTorch {} of {}, its DistributedDataParallel over Gloo\n", python->torch,
                             python->program)
              << std::flush;

  DdpPrinter printer(plan, {.json = arguments.json, .shows_progress = ::isatty(STDERR_FILENO) != 0}, std::cout,
                     std::cerr);
  const int code = run_ranks(
      plan, [&] { return to_text(plan); }, options,
      [&](const std::string& line) { printer.take(ddp_message_from(line)); });
  printer.finish();
  return code == 0 && printer.has_wrong() ? kWrongResults : code;
}

}  // namespace lockstep::bench
