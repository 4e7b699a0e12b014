#include "doctor/checks.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <lockstep/version.h>

namespace lockstep::tool {
namespace {

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

/// The origin of the library, derived from its path.
const char* origin_of(const std::string& library) {
  if (contains(library, "/site-packages/") || contains(library, "/dist-packages/")) return "from a Python wheel";
  if (library.starts_with("/usr/lib")) return "from the distribution";
  return "installed manually";
}

/// A backend that connects processes without GPUs, and the package to build it with.
struct ProcessBackend {
  const char* name;
  const char* package;
};

constexpr ProcessBackend kProcessBackends[] = {{"gloo", "libgloo-dev"}, {"mpi", "libopenmpi-dev"}};

}  // namespace

Finding check_torch(const Probe& probe) {
  if (!probe.failure.empty())
    return {"LibTorch", Status::kError, fmt::format("the probe failed: {}", probe.failure),
            probe.program.empty()
                ? "build or install all of lockstep (target lockstep_probe), or pass the program's path with --probe"
                : fmt::format("run {} by hand; `ldd` on it lists missing libraries", probe.program)};
  if (probe.lockstep_version != LOCKSTEP_VERSION_STRING)
    return {"LibTorch", Status::kError,
            fmt::format("{} belongs to lockstep {}, but this is {}", probe.program, probe.lockstep_version,
                        LOCKSTEP_VERSION_STRING),
            "install all of lockstep from one build"};
  return {"LibTorch", Status::kOk,
          fmt::format("{}, {}: {}", probe.torch_version, origin_of(probe.torch_library), probe.torch_library)};
}

Finding check_blas(const Probe& probe, const Machine& machine) {
  const std::string remedy = fmt::format(
      "apt-get install libopenblas0-pthread; if already installed, update-alternatives --config "
      "libblas.so.3-{}-linux-gnu",
      machine.architecture);
  if (probe.blas_libraries.empty())
    return {"BLAS", Status::kOk, probe.has_mkl ? "MKL, built into LibTorch" : "built into LibTorch"};
  const auto any = [&](const char* part) {
    return std::any_of(probe.blas_libraries.begin(), probe.blas_libraries.end(),
                       [&](const std::string& path) { return contains(path, part); });
  };
  const std::string found(fmt::format("{}", fmt::join(probe.blas_libraries, ", ")));
  if (any("openblas-serial")) return {"BLAS", Status::kWarning, found + ": OpenBLAS without threads", remedy};
  for (const char* known : {"openblas", "libmkl_", "blis", "libarmpl", "libnvpl_blas", "libatlas"})
    if (any(known)) {
      const auto shown = std::find_if(probe.blas_libraries.begin(), probe.blas_libraries.end(), [&](const auto& path) {
        return contains(std::filesystem::path(path).filename(), known);
      });
      return {"BLAS", Status::kOk, shown == probe.blas_libraries.end() ? found : *shown};
    }
  return {"BLAS", Status::kWarning, found + ": the reference BLAS, many times slower than OpenBLAS or MKL", remedy};
}

Finding check_convolutions(const Probe& probe, const Machine& machine) {
  constexpr double kNoticeableSlowdown = 1.5;
  if (!probe.has_mkldnn) return {"convolutions", Status::kOk, "native: LibTorch is built without MKL-DNN"};
  if (!probe.uses_mkldnn || !probe.convolution_ms || !probe.convolution_without_mkldnn_ms)
    return {"convolutions", Status::kOk, "native: MKL-DNN is off"};
  const double with = *probe.convolution_ms;
  const double without = *probe.convolution_without_mkldnn_ms;
  const std::string times = fmt::format("{:.1f} ms with MKL-DNN, {:.1f} ms without", with, without);
  if (with < kNoticeableSlowdown * without) return {"convolutions", Status::kOk, times};
  const bool is_known = machine.architecture == "aarch64" && probe.torch_version.starts_with("1.");
  return {"convolutions", Status::kWarning, times,
          is_known ? "call lockstep::prefer_fast_convolutions() at the start of main"
                   : "call at::globalContext().setUserEnabledMkldnn(false) at the start of main"};
}

Finding check_backends(const Probe& probe) {
  const std::string found(fmt::format("{}", fmt::join(probe.backends, ", ")));
  std::vector<std::string> packages;
  bool joins_processes = has_backend(probe, "nccl");
  for (const auto& backend : kProcessBackends) {
    const bool is_available = has_backend(probe, backend.name);
    joins_processes = joins_processes || is_available;
    if (!is_available) packages.push_back(fmt::format("{} for {}", backend.package, backend.name));
  }
  const std::string remedy =
      packages.empty() ? "" : fmt::format("apt-get install {}, then rebuild lockstep", fmt::join(packages, ", "));
  if (!joins_processes) return {"backends", Status::kError, found + ": none of them connects processes", remedy};
  if (!has_backend(probe, "gloo"))
    return {"backends", Status::kWarning, found + ": gloo, the backend for CPUs, is missing", remedy};
  return {"backends", Status::kOk, found, remedy};
}

}  // namespace lockstep::tool
