#include "doctor/env_report.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iostream>
#include <memory>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <lockstep/version.h>

#include "cli/commands.h"

extern char** environ;

namespace lockstep::tool {
namespace {

bool is_relevant(const std::string& name) {
  for (const char* prefix : {"LOCKSTEP_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_LOCAL", "TORCHELASTIC_",
                             "NCCL_", "OMP_", "CUDA_VISIBLE_DEVICES"})
    if (name.starts_with(prefix)) return true;
  for (const char* exact :
       {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "ROLE_RANK",
        "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "LD_LIBRARY_PATH", "LD_PRELOAD", "TMPDIR"})
    if (name == exact) return true;
  return false;
}

bool is_secret(std::string name) {
  if (name == "LOCKSTEP_SECRET_FILE") return false;  // a path
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::toupper(c); });
  for (const char* part : {"SECRET", "TOKEN", "KEY", "PASSWORD", "PASSWD", "CREDENTIAL", "JWT"})
    if (name.find(part) != std::string::npos) return true;
  return false;
}

using nlohmann::ordered_json;

ordered_json or_null(const std::string& text) {
  return text.empty() ? ordered_json() : ordered_json(text);
}

ordered_json describe_cgroup(const CgroupLimits& limits) {
  ordered_json cgroup;
  cgroup["cores"] = limits.cores ? ordered_json(*limits.cores) : ordered_json("unlimited");
  cgroup["memory"] = limits.memory_bytes ? format_bytes(*limits.memory_bytes) : "unlimited";
  cgroup["processes"] = limits.processes ? ordered_json(*limits.processes) : ordered_json("unlimited");
  return cgroup;
}

ordered_json describe_machine(const std::string& host, const Machine& machine) {
  return {{"host", host},
          {"system", machine.system},
          {"kernel", machine.kernel},
          {"architecture", machine.architecture},
          {"cpu", machine.cpu_model},
          {"cores", machine.cores},
          {"allowed cores", machine.allowed_cores},
          {"NUMA nodes", machine.numa_nodes},
          {"memory", format_bytes(machine.memory_bytes)},
          {"free memory", format_bytes(machine.available_memory_bytes)}};
}

ordered_json describe_torch(const Probe& probe) {
  if (!probe.failure.empty()) return {{"could not be asked", probe.failure}};
  auto gpus = ordered_json::array();
  for (const auto& gpu : probe.gpus) gpus.push_back(fmt::format("{}, {}", gpu.name, format_bytes(gpu.memory_bytes)));
  return {{"version", probe.torch_version},
          {"library", probe.torch_library},
          {"compiler", probe.compiler},
          {"threads", probe.threads},
          {"BLAS", probe.blas_libraries},
          {"MKL", probe.has_mkl},
          {"MKL-DNN", probe.uses_mkldnn},
          {"CUDA", or_null(probe.cuda_version)},
          {"GPUs", gpus},
          {"NCCL", probe.cuda_version.empty() ? ordered_json() : or_null(probe.nccl_version)}};
}

/// Replaces control characters, so that the text stays on one line.
std::string on_one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return std::iscntrl(c) != 0; }, '?');
  return text;
}

std::vector<std::string> lines_of(const ordered_json& value) {
  if (value.is_null()) return {"none"};
  if (value.is_boolean()) return {value.get<bool>() ? "yes" : "no"};
  if (value.is_string()) return {on_one_line(value.get<std::string>())};
  if (!value.is_array()) return {value.dump()};
  std::vector<std::string> lines;
  for (const auto& item : value) lines.push_back(on_one_line(item.get<std::string>()));
  if (lines.empty()) lines.push_back("none");
  return lines;
}

struct EnvArguments {
  std::string probe_program{};
  bool json = false;
};

void print_report(const EnvArguments& arguments) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  const auto report =
      describe(host, read_machine(), run_probe(arguments.probe_program), relevant_variables(process_variables()));
  // Text from the environment may not be valid UTF-8, which JSON requires.
  if (arguments.json)
    std::cout << report.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << std::endl;
  else
    std::cout << to_text(report) << std::flush;
}

}  // namespace

Variables process_variables() {
  Variables variables;
  for (char** entry = environ; entry && *entry; ++entry)
    if (char* equals = std::strchr(*entry, '=')) variables[std::string(*entry, equals)] = equals + 1;
  return variables;
}

Variables relevant_variables(const Variables& all) {
  Variables result;
  for (const auto& [name, value] : all)
    if (is_relevant(name)) result[name] = is_secret(name) ? "(hidden)" : value;
  return result;
}

Variables nccl_variables(const Variables& all) {
  Variables nccl = relevant_variables(all);
  std::erase_if(nccl, [](const auto& variable) { return !variable.first.starts_with("NCCL_"); });
  return nccl;
}

ordered_json describe(const std::string& host, const Machine& machine, const Probe& probe, const Variables& variables) {
  ordered_json report;
  report["lockstep"] = {{"version", LOCKSTEP_VERSION_STRING}};
  if (probe.failure.empty()) report["lockstep"]["backends"] = probe.backends;
  report["machine"] = describe_machine(host, machine);
  report["cgroup limits"] = describe_cgroup(machine.cgroup);
  report["LibTorch"] = describe_torch(probe);
  report["variables"] = ordered_json::object();
  for (const auto& [name, value] : variables) report["variables"][name] = value;
  return report;
}

std::string to_text(const ordered_json& report) {
  size_t columns = 0;
  for (const auto& section : report)
    for (const auto& item : section.items()) columns = std::max(columns, item.key().size());
  std::string text;
  for (const auto& section : report.items()) {
    text += fmt::format("{}{}\n", text.empty() ? "" : "\n", section.key());
    if (section.value().empty()) text += "  none\n";
    for (const auto& item : section.value().items()) {
      std::string name = item.key();
      for (const auto& line : lines_of(item.value())) {
        text += fmt::format("  {:<{}}  {}\n", name, columns, line);
        name.clear();
      }
    }
  }
  return text;
}

}  // namespace lockstep::tool

void add_env(CLI::App& app, int& exit_code) {
  using lockstep::tool::EnvArguments;
  auto arguments = std::make_shared<EnvArguments>();
  auto* command = app.add_subcommand("env", "Print versions, machine and variables for a bug report");
  command->add_option("--probe", arguments->probe_program, "Path of lockstep-probe, if it is not beside lockstep")
      ->type_name("FILE");
  command->add_flag("--json", arguments->json, "Print one JSON object");
  command->footer(
      "The values of variables whose names suggest a secret, token, key or password are hidden.\n\n"
      "Examples:\n"
      "  lockstep env\n"
      "  lockstep env --json > environment.json\n\n"
      "Exit codes:\n"
      "  0   the report was printed\n"
      "  2   wrong usage");
  command->callback([arguments, &exit_code] {
    lockstep::tool::print_report(*arguments);
    exit_code = 0;
  });
}
