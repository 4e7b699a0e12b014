#include "judge_torch.h"

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

/// A backend that connects processes, and the package to build it with.
struct ProcessBackend {
  const char* name;
  const char* package;
  bool is_for_gpus;
};

constexpr ProcessBackend kProcessBackends[] = {
    {"gloo", "libgloo-dev", false}, {"mpi", "libopenmpi-dev", false}, {"nccl", "libnccl-dev", true}};

bool has_backend(const Probe& probe, const char* name) {
  return std::find(probe.backends.begin(), probe.backends.end(), name) != probe.backends.end();
}

std::string list(const std::vector<Gpu>& gpus) {
  const bool are_alike = std::all_of(gpus.begin(), gpus.end(), [&](const Gpu& gpu) { return gpu == gpus.front(); });
  if (are_alike)
    return fmt::format("{} x {}, {}{}", gpus.size(), gpus[0].name, bytes_in_words(gpus[0].memory_bytes),
                       gpus.size() > 1 ? " each" : "");
  std::vector<std::string> names;
  for (const auto& gpu : gpus) names.push_back(fmt::format("{} ({})", gpu.name, bytes_in_words(gpu.memory_bytes)));
  return fmt::format("{}", fmt::join(names, ", "));
}

Finding judge_absent_gpus(const Probe& probe, const Machine& machine,
                          const std::optional<std::string>& visible_devices) {
  if (!machine.has_nvidia_driver && !probe.has_cuda) return {"GPUs", Status::kOk, "none; ranks compute on the CPU"};
  if (!probe.has_cuda)
    return {"GPUs", Status::kWarning, "NVIDIA's driver is here, but this LibTorch is for CPUs",
            "build lockstep with a CUDA build of LibTorch: set CMAKE_PREFIX_PATH to it"};
  const std::string cuda = fmt::format("none seen by a LibTorch for CUDA {}", probe.cuda_version);
  if (!machine.has_nvidia_driver)
    return {"GPUs", Status::kWarning, cuda + ": NVIDIA's driver is missing",
            "install the driver; in a container, docker run --gpus all"};
  if (visible_devices)
    return {"GPUs", Status::kWarning, fmt::format("{}: CUDA_VISIBLE_DEVICES is \"{}\"", cuda, *visible_devices),
            "unset CUDA_VISIBLE_DEVICES, or name devices that nvidia-smi -L lists"};
  return {"GPUs", Status::kWarning, cuda, "nvidia-smi says why: is the driver older than this CUDA?"};
}

}  // namespace

Finding judge_torch(const Probe& probe) {
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

Finding judge_blas(const Probe& probe, const Machine& machine) {
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

Finding judge_convolutions(const Probe& probe, const Machine& machine) {
  constexpr double kWorthAWord = 1.5;
  if (!probe.has_mkldnn) return {"convolutions", Status::kOk, "LibTorch's own: it is built without MKL-DNN"};
  if (!probe.uses_mkldnn || !probe.convolution_ms || !probe.convolution_without_mkldnn_ms)
    return {"convolutions", Status::kOk, "LibTorch's own: MKL-DNN is off"};
  const double with = *probe.convolution_ms;
  const double without = *probe.convolution_without_mkldnn_ms;
  const std::string times = fmt::format("{:.1f} ms with MKL-DNN, {:.1f} ms without", with, without);
  if (with < kWorthAWord * without) return {"convolutions", Status::kOk, times};
  const bool is_known = machine.architecture == "aarch64" && probe.torch_version.starts_with("1.");
  return {"convolutions", Status::kWarning, times,
          is_known ? "call lockstep::prefer_fast_convolutions() first thing in main"
                   : "call at::globalContext().setUserEnabledMkldnn(false) first thing in main"};
}

Finding judge_gpus(const Probe& probe, const Machine& machine, int ranks,
                   const std::optional<std::string>& visible_devices) {
  if (probe.gpus.empty()) return judge_absent_gpus(probe, machine, visible_devices);
  const std::string found = fmt::format("{} (CUDA {})", list(probe.gpus), probe.cuda_version);
  if (static_cast<size_t>(ranks) > probe.gpus.size())
    return {"GPUs", Status::kWarning, fmt::format("{}, for {} ranks: they compute on the CPU", found, ranks),
            fmt::format("start at most {} here", probe.gpus.size())};
  return {"GPUs", Status::kOk, found};
}

Finding judge_nccl(const Probe& probe) {
  if (!probe.nccl_version.empty())
    return {"NCCL", Status::kOk,
            probe.has_cuda ? probe.nccl_version : probe.nccl_version + ", without use for a LibTorch for CPUs"};
  if (probe.gpus.size() > 1)
    return {"NCCL", Status::kWarning, fmt::format("none, and {} GPUs that it would connect", probe.gpus.size()),
            "apt-get install libnccl2, or a LibTorch that brings it"};
  return {"NCCL", Status::kOk, probe.gpus.empty() ? "none, and no GPUs that need it" : "none; one GPU does without"};
}

Finding judge_backends(const Probe& probe) {
  const std::string found(fmt::format("{}", fmt::join(probe.backends, ", ")));
  std::vector<std::string> packages;
  bool joins_processes = false;
  for (const auto& backend : kProcessBackends) {
    const bool is_there = has_backend(probe, backend.name);
    joins_processes = joins_processes || is_there;
    if (!is_there && (!backend.is_for_gpus || probe.has_cuda))
      packages.push_back(fmt::format("{} for {}", backend.package, backend.name));
  }
  const std::string remedy =
      packages.empty() ? "" : fmt::format("apt-get install {}; then build lockstep again", fmt::join(packages, ", "));
  if (!joins_processes) return {"backends", Status::kError, found + ": none connects processes", remedy};
  if (!has_backend(probe, "gloo")) return {"backends", Status::kWarning, found + ": no gloo, for CPUs", remedy};
  if (!has_backend(probe, "nccl") && probe.gpus.size() > 1)
    return {"backends", Status::kWarning, found + ": no nccl, which is fastest between GPUs", remedy};
  return {"backends", Status::kOk, found, remedy};
}

}  // namespace lockstep::tool
