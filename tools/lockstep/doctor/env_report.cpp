#include "doctor/env_report.h"

#include <algorithm>
#include <cctype>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <lockstep/version.h>

namespace lockstep::tool {
namespace {

using nlohmann::ordered_json;

ordered_json or_null(const std::string& text) {
  return text.empty() ? ordered_json() : ordered_json(text);
}

ordered_json describe_cgroup(const CgroupLimits& limits) {
  ordered_json cgroup;
  cgroup["cores"] = limits.cores ? ordered_json(*limits.cores) : ordered_json("unlimited");
  cgroup["memory"] = limits.memory_bytes ? bytes_in_words(*limits.memory_bytes) : "unlimited";
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
          {"memory", bytes_in_words(machine.memory_bytes)},
          {"free memory", bytes_in_words(machine.available_memory_bytes)}};
}

ordered_json describe_torch(const Probe& probe) {
  if (!probe.failure.empty()) return {{"could not be asked", probe.failure}};
  auto gpus = ordered_json::array();
  for (const auto& gpu : probe.gpus) gpus.push_back(fmt::format("{}, {}", gpu.name, bytes_in_words(gpu.memory_bytes)));
  return {{"version", probe.torch_version},     {"library", probe.torch_library},      {"compiler", probe.compiler},
          {"threads", probe.threads},           {"BLAS", probe.blas_libraries},        {"MKL", probe.has_mkl},
          {"MKL-DNN", probe.uses_mkldnn},       {"CUDA", or_null(probe.cuda_version)}, {"GPUs", gpus},
          {"NCCL", or_null(probe.nccl_version)}};
}

/// One line, whatever is in it.
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

}  // namespace

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
