#include "doctor/torch_probe.h"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "run/child_process.h"

namespace lockstep::tool {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kName = "lockstep-probe";

template <class Value>
std::optional<Value> optional_of(const json& object, const char* name) {
  const json& value = object.at(name);
  return value.is_null() ? std::nullopt : std::optional<Value>(value.get<Value>());
}

Probe from_json(const json& printed) {
  Probe probe;
  printed.at("lockstep").get_to(probe.lockstep_version);
  printed.at("compiler").get_to(probe.compiler);
  printed.at("libtorch").at("version").get_to(probe.torch_version);
  printed.at("libtorch").at("library").get_to(probe.torch_library);
  printed.at("threads").get_to(probe.threads);
  printed.at("blas").at("mkl").get_to(probe.has_mkl);
  printed.at("blas").at("libraries").get_to(probe.blas_libraries);
  const json& mkldnn = printed.at("mkldnn");
  mkldnn.at("built_in").get_to(probe.has_mkldnn);
  mkldnn.at("enabled").get_to(probe.uses_mkldnn);
  probe.convolution_ms = optional_of<double>(mkldnn, "convolution_ms");
  probe.convolution_without_mkldnn_ms = optional_of<double>(mkldnn, "convolution_without_ms");
  const json& cuda = printed.at("cuda");
  cuda.at("built_in").get_to(probe.has_cuda);
  probe.cuda_version = optional_of<std::string>(cuda, "version").value_or("");
  for (const json& gpu : cuda.at("gpus"))
    probe.gpus.push_back({gpu.at("name").get<std::string>(), gpu.at("memory_bytes").get<uint64_t>()});
  probe.nccl_version = optional_of<std::string>(printed, "nccl").value_or("");
  printed.at("backends").get_to(probe.backends);
  return probe;
}

Probe failed(const std::string& failure) {
  Probe probe;
  probe.failure = failure;
  return probe;
}

}  // namespace

bool has_backend(const Probe& probe, const std::string& name) {
  return std::find(probe.backends.begin(), probe.backends.end(), name) != probe.backends.end();
}

Probe parse_probe(const std::string& printed) {
  try {
    return from_json(json::parse(printed));
  } catch (const json::exception& error) {
    constexpr size_t kQuoted = 60;
    const std::string quoted = printed.substr(0, printed.find('\n')).substr(0, kQuoted);
    return failed(fmt::format("printed \"{}\", which is not the output of {} ({})", quoted, kName, error.what()));
  }
}

Probe run_probe(const fs::path& program, std::chrono::milliseconds limit) {
  const fs::path found = program.empty() ? find_helper_program(kName) : program;
  if (found.empty()) return failed(fmt::format("{} is neither beside lockstep nor in ../libexec/lockstep", kName));
  const auto ran = run_program({found.string()}, limit);
  Probe probe = ran.failure.empty() ? parse_probe(ran.output) : failed(ran.failure);
  if (!probe.failure.empty()) probe.failure = fmt::format("{} {}", found.string(), probe.failure);
  probe.program = found.string();
  return probe;
}

}  // namespace lockstep::tool
