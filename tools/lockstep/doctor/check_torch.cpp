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

/// Whose library it is, as far as its path tells.
const char* origin_of(const std::string& library) {
  if (contains(library, "/site-packages/") || contains(library, "/dist-packages/")) return "a Python wheel's";
  if (library.starts_with("/usr/lib")) return "the distribution's";
  return "installed by hand";
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
    return {"LibTorch", Status::kError, fmt::format("could not be asked: {}", probe.failure),
            probe.program.empty()
                ? "build or install lockstep whole (target lockstep_probe), or name the program with --probe"
                : fmt::format("run {} by hand; `ldd` of it names libraries that are missing", probe.program)};
  if (probe.lockstep_version != LOCKSTEP_VERSION_STRING)
    return {
        "LibTorch", Status::kError,
        fmt::format("{} is of lockstep {}, this is {}", probe.program, probe.lockstep_version, LOCKSTEP_VERSION_STRING),
        "install lockstep whole from one build"};
  return {"LibTorch", Status::kOk,
          fmt::format("{}, {}: {}", probe.torch_version, origin_of(probe.torch_library), probe.torch_library)};
}

Finding check_blas(const Probe& probe, const Machine& machine) {
  const std::string remedy = fmt::format(
      "apt-get install libopenblas0-pthread; if it is, update-alternatives --config libblas.so.3-{}-linux-gnu",
      machine.architecture);
  if (probe.blas_libraries.empty())
    return {"BLAS", Status::kOk, probe.has_mkl ? "MKL, a part of LibTorch" : "a part of LibTorch"};
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
  return {"BLAS", Status::kWarning, found + ": the reference BLAS, many times slower than others", remedy};
}

Finding check_convolutions(const Probe& probe, const Machine& machine) {
  constexpr double kNoticeableSlowdown = 1.5;
  if (!probe.has_mkldnn) return {"convolutions", Status::kOk, "LibTorch's own: it is built without MKL-DNN"};
  if (!probe.uses_mkldnn || !probe.convolution_ms || !probe.convolution_without_mkldnn_ms)
    return {"convolutions", Status::kOk, "LibTorch's own: MKL-DNN is off"};
  const double with = *probe.convolution_ms;
  const double without = *probe.convolution_without_mkldnn_ms;
  const std::string times = fmt::format("{:.1f} ms with MKL-DNN, {:.1f} ms without", with, without);
  if (with < kNoticeableSlowdown * without) return {"convolutions", Status::kOk, times};
  const bool is_known = machine.architecture == "aarch64" && probe.torch_version.starts_with("1.");
  return {"convolutions", Status::kWarning, times,
          is_known ? "call lockstep::prefer_fast_convolutions() first thing in main"
                   : "call at::globalContext().setUserEnabledMkldnn(false) first thing in main"};
}

Finding check_backends(const Probe& probe) {
  const std::string found(fmt::format("{}", fmt::join(probe.backends, ", ")));
  std::vector<std::string> packages;
  bool joins_processes = has_backend(probe, "nccl");
  for (const auto& backend : kProcessBackends) {
    const bool is_there = has_backend(probe, backend.name);
    joins_processes = joins_processes || is_there;
    if (!is_there) packages.push_back(fmt::format("{} for {}", backend.package, backend.name));
  }
  const std::string remedy =
      packages.empty() ? "" : fmt::format("apt-get install {}; then build lockstep again", fmt::join(packages, ", "));
  if (!joins_processes) return {"backends", Status::kError, found + ": none connects processes", remedy};
  if (!has_backend(probe, "gloo")) return {"backends", Status::kWarning, found + ": no gloo, for CPUs", remedy};
  return {"backends", Status::kOk, found, remedy};
}

}  // namespace lockstep::tool
