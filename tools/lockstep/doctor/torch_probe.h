#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace lockstep::tool {

struct Gpu {
  std::string name;
  uint64_t memory_bytes = 0;

  bool operator==(const Gpu&) const = default;
};

/// Facts that require LibTorch, as printed by the helper program lockstep-probe.
struct Probe {
  std::string failure{};  // why the probe failed; the other members are then meaningless
  std::string program{};  // path of the helper
  std::string lockstep_version{};
  std::string compiler{};
  std::string torch_version{};
  std::string torch_library{};  // path of the loaded library
  int threads = 1;              // number of intra-op threads
  bool has_mkl = false;
  std::vector<std::string> blas_libraries{};  // paths
  bool has_mkldnn = false;
  bool uses_mkldnn = false;
  std::optional<double> convolution_ms{};                 // time of one small convolution
  std::optional<double> convolution_without_mkldnn_ms{};  // none if MKL-DNN is off
  bool has_cuda = false;                                  // LibTorch was built with CUDA
  std::string cuda_version{};
  std::vector<Gpu> gpus{};     // GPUs visible to LibTorch
  std::string nccl_version{};  // empty: no NCCL
  std::vector<std::string> backends{};
};

/// Whether this build of lockstep has the backend. False for a failed probe.
bool has_backend(const Probe& probe, const std::string& name);

/// Parses the output of lockstep-probe. Other output gives a failure that quotes it.
Probe parse_probe(const std::string& printed);

/// Runs the helper and parses its output. If `program` is empty, uses the lockstep-probe beside this program or in
/// ../libexec/lockstep.
Probe run_probe(const std::filesystem::path& program, std::chrono::milliseconds limit = std::chrono::seconds(20));

}  // namespace lockstep::tool
