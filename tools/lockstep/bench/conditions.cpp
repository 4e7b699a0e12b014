#include "bench/conditions.h"

#include <chrono>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <lockstep/error.h>

#include "run/helper_program.h"
#include "run/mpirun_command.h"
#include "run/run_program.h"

namespace lockstep::bench {
namespace {

constexpr const char* kBenchProgram = "lockstep-bench";

std::string counted(int number, const char* noun) {
  return fmt::format("{} {}{}", number, noun, number == 1 ? "" : "s");
}

}  // namespace

std::string find_program() {
  const auto program = tool::find_helper_program(kBenchProgram).string();
  if (program.empty())
    throw SystemError(fmt::format("{} is neither beside lockstep nor in ../libexec/lockstep", kBenchProgram));
  return program;
}

std::vector<std::string> ask_backends(const std::string& program) {
  const auto answer = tool::run_program({program, "--backends"}, std::chrono::seconds(60));
  if (!answer.failure.empty()) throw SystemError(fmt::format("{} {}", program, answer.failure));
  return nlohmann::json::parse(answer.output);
}

void require_mpirun(const std::string& option) {
  if (!tool::has_mpirun()) throw UsageError(fmt::format("{}: mpi cannot be measured: {}", option, kNoMpirun));
}

void settle_on_cores(RunPlan& plan, const Arguments& arguments, const tool::Machine& machine) {
  plan.is_crowded = plan.ranks > tool::usable_cores(machine);
  plan.bind = !arguments.no_bind && plan.ranks * arguments.threads <= machine.allowed_cores;
}

std::string describe_conditions(const RunPlan& plan, int threads, const tool::Machine& machine) {
  return fmt::format("{} of {} on {} of {}, {}", counted(plan.ranks, "rank"), counted(threads, "thread"),
                     counted(machine.allowed_cores, "core"), machine.cpu_model, plan.bind ? "pinned" : "not pinned");
}

}  // namespace lockstep::bench
