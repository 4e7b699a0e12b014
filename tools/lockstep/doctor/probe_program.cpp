// lockstep-probe: prints facts that require LibTorch as one JSON object. `lockstep doctor` and `lockstep env` run it,
// so that lockstep itself does not load LibTorch.

#include <dlfcn.h>
#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iostream>
#include <set>
#include <string>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/conv2d.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/rand.h>
#include <c10/core/GradMode.h>
#include <torch/cuda.h>
#include <torch/version.h>
#include <nlohmann/json.hpp>

#include <lockstep/backend.h>
#include <lockstep/version.h>

namespace {

using nlohmann::json;

const char* compiler() {
#if defined(__clang__)
  return __VERSION__;  // begins with its name
#else
  return "GCC " __VERSION__;
#endif
}

/// The path of the LibTorch library that is loaded.
std::string torch_library() {
  Dl_info info{};
  at::Context& (*function)() = &at::globalContext;
  if (::dladdr(reinterpret_cast<void*>(function), &info) == 0 || !info.dli_fname) return "";
  char resolved[PATH_MAX] = {};
  return ::realpath(info.dli_fname, resolved) ? resolved : info.dli_fname;
}

/// The mapped files whose names start with one of `names`.
std::set<std::string> mapped(std::initializer_list<const char*> names) {
  std::set<std::string> found;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const auto path = line.find('/');
    if (path == std::string::npos) continue;
    const std::string file = line.substr(line.rfind('/') + 1);
    for (const char* name : names)
      if (file.starts_with(name)) found.insert(line.substr(path));
  }
  return found;
}

json blas() {
  at::mm(at::rand({64, 64}), at::rand({64, 64}));  // some libraries are loaded on first use
  return {
      {"mkl", at::hasMKL()},
      {"libraries", mapped({"libopenblas", "libmkl_", "libblas", "libblis", "libatlas", "libarmpl", "libnvpl_blas"})}};
}

double time_convolution(bool with_mkldnn) {
  const bool before = at::globalContext().userEnabledMkldnn();
  at::globalContext().setUserEnabledMkldnn(with_mkldnn);
  const auto images = at::rand({8, 32, 28, 28});
  const auto weights = at::rand({64, 32, 3, 3});
  auto best = std::chrono::steady_clock::duration::max();
  for (int round = 0; round < 5; ++round) {
    const auto start = std::chrono::steady_clock::now();
    at::conv2d(images, weights, {}, 1, 1);
    best = std::min(best, std::chrono::steady_clock::now() - start);
  }
  at::globalContext().setUserEnabledMkldnn(before);
  return std::chrono::duration<double, std::milli>(best).count();
}

json mkldnn() {
  c10::NoGradGuard no_gradients;
  const bool built_in = at::hasMKLDNN();
  const bool enabled = built_in && at::globalContext().userEnabledMkldnn();
  json times{{"built_in", built_in}, {"enabled", enabled}, {"convolution_ms", time_convolution(enabled)}};
  times["convolution_without_ms"] = enabled ? json(time_convolution(false)) : json();
  return times;
}

/// Returns "2.18.5" for 21805; before NCCL 2.9 codes had four digits: "2.8.5" for 2805.
std::string nccl_version_of(int code) {
  const int major = code < 10000 ? code / 1000 : code / 10000;
  const int minor = code < 10000 ? code / 100 % 10 : code / 100 % 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(code % 100);
}

/// The version of the NCCL that this process would use: the one loaded by LibTorch, else the system's.
json nccl_version() {
  void* function = ::dlsym(RTLD_DEFAULT, "ncclGetVersion");
  void* library = function ? nullptr : ::dlopen("libnccl.so.2", RTLD_LAZY | RTLD_LOCAL);
  if (library) function = ::dlsym(library, "ncclGetVersion");
  int code = 0;
  if (!function || reinterpret_cast<int (*)(int*)>(function)(&code) != 0) return nullptr;
  return nccl_version_of(code);
}

/// CUDA's driver API, loaded at run time: a LibTorch without CUDA comes without its headers.
struct Driver {
  void* library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);

  template <class... Arguments>
  bool call(const char* name, Arguments... arguments) const {
    void* function = library ? ::dlsym(library, name) : nullptr;
    return function && reinterpret_cast<int (*)(Arguments...)>(function)(arguments...) == 0;
  }
};

json gpus() {
  json list = json::array();
  const int count = static_cast<int>(torch::cuda::device_count());
  if (count == 0) return list;
  const Driver driver;
  driver.call("cuInit", 0U);
  for (int index = 0; index < count; ++index) {
    char name[256] = "unknown";
    size_t bytes = 0;
    int device = 0;
    if (driver.call("cuDeviceGet", &device, index)) {
      driver.call("cuDeviceGetName", static_cast<char*>(name), static_cast<int>(sizeof name), device);
      driver.call("cuDeviceTotalMem_v2", &bytes, device);
    }
    list.push_back({{"name", name}, {"memory_bytes", bytes}});
  }
  return list;
}

/// The CUDA version that LibTorch was built with; null without CUDA.
json cuda_version(bool built_in) {
  if (!built_in) return nullptr;
  try {
    const int64_t code = at::detail::getCUDAHooks().versionCUDART();  // 12010 is 12.1
    return std::to_string(code / 1000) + "." + std::to_string(code % 1000 / 10);
  } catch (const c10::Error&) {
    return nullptr;
  }
}

json cuda() {
  const bool built_in = !mapped({"libtorch_cuda"}).empty();
  return {{"built_in", built_in}, {"version", cuda_version(built_in)}, {"gpus", gpus()}};
}

}  // namespace

int main() try {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);  // the output is useless without the parent
  json answer{{"lockstep", LOCKSTEP_VERSION_STRING},
              {"compiler", compiler()},
              {"libtorch", {{"version", TORCH_VERSION}, {"library", torch_library()}}},
              {"threads", at::get_num_threads()},
              {"blas", blas()},
              {"mkldnn", mkldnn()},
              {"cuda", cuda()},
              {"nccl", nccl_version()},
              {"backends", lockstep::available_backends()}};
  std::cout << answer.dump(2) << std::endl;
} catch (const std::exception& error) {
  std::cerr << "lockstep-probe: " << error.what() << '\n';
  return 1;
}
