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

/// What only LibTorch knows, as the helper program lockstep-probe prints it.
struct Probe {
  std::string failure{};  // why it could not be asked; all else is then without meaning
  std::string program{};  // where the helper is
  std::string lockstep_version{};
  std::string compiler{};
  std::string torch_version{};
  std::string torch_library{};  // the path of the library that was loaded
  int threads = 1;              // that LibTorch would compute with
  bool has_mkl = false;
  std::vector<std::string> blas_libraries{};  // paths
  bool has_mkldnn = false;
  bool uses_mkldnn = false;
  std::optional<double> convolution_ms{};                 // one small convolution
  std::optional<double> convolution_without_mkldnn_ms{};  // the same; none where there is no choice
  bool has_cuda = false;                                  // LibTorch was built for it
  std::string cuda_version{};
  std::vector<Gpu> gpus{};     // that LibTorch sees
  std::string nccl_version{};  // empty: there is none
  std::vector<std::string> backends{};
};

/// Whether this build of lockstep has the backend. Of a probe that failed: no.
bool has_backend(const Probe& probe, const std::string& name);

/// Reads what lockstep-probe printed; a failure that quotes it when it is something else.
Probe parse_probe(const std::string& printed);

/// Starts the helper and waits for its answer. `program` empty: the one beside this program, or in ../libexec/lockstep
/// where it is installed.
Probe run_probe(const std::filesystem::path& program, std::chrono::milliseconds limit = std::chrono::seconds(20));

}  // namespace lockstep::tool
