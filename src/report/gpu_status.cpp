#include "report/gpu_status.h"

#include <dlfcn.h>

#include <array>
#include <type_traits>
#include <utility>

#include "base/log.h"
#include "base/text.h"

// NVML's functions as declared in nvml.h, which need not be installed. All of them return 0 on success.

namespace lockstep::detail {

struct NvmlMemory {
  unsigned long long total, free, used;
};
struct NvmlUtilization {
  unsigned int gpu, memory;  // percent
};

namespace {

constexpr int kNvmlSuccess = 0;

/// The PCI address of the GPU, by which NVML finds it: NVML numbers all GPUs of the host, CUDA only the visible GPUs.
/// CUDA is already loaded if LibTorch uses a GPU. Empty if CUDA is not found.
std::string pci_bus_id(c10::Device device) {
  using GetPciBusId = int (*)(char*, int, int);
  const auto get = reinterpret_cast<GetPciBusId>(::dlsym(RTLD_DEFAULT, "cudaDeviceGetPCIBusId"));
  std::array<char, 64> id{};
  if (!get || get(id.data(), static_cast<int>(id.size()), device.has_index() ? device.index() : 0) != 0) return "";
  return id.data();
}

}  // namespace

struct GpuMonitor::Library {
  using Init = int (*)();
  using FindByPci = int (*)(const char*, void**);
  using GetName = int (*)(void*, char*, unsigned int);
  using GetUtilization = int (*)(void*, NvmlUtilization*);
  using GetMemory = int (*)(void*, NvmlMemory*);

  /// Returns whether all functions were found and the library works.
  bool open() {
    handle = ::dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle) return false;
    const auto find = [this](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
      return function != nullptr;
    };
    Init init = nullptr;
    is_open = find(shut_down, "nvmlShutdown") && find(find_by_pci, "nvmlDeviceGetHandleByPciBusId_v2") &&
              find(get_name, "nvmlDeviceGetName") && find(get_utilization, "nvmlDeviceGetUtilizationRates") &&
              find(get_memory, "nvmlDeviceGetMemoryInfo") && find(init, "nvmlInit_v2") && init() == kNvmlSuccess;
    return is_open;
  }
  ~Library() {
    if (is_open) shut_down();
    if (handle) ::dlclose(handle);
  }

  void* handle = nullptr;
  bool is_open = false;
  Init shut_down = nullptr;
  FindByPci find_by_pci = nullptr;
  GetName get_name = nullptr;
  GetUtilization get_utilization = nullptr;
  GetMemory get_memory = nullptr;
};

std::unique_ptr<GpuMonitor> GpuMonitor::open(c10::Device device) {
  if (!device.is_cuda()) return nullptr;
  auto library = std::make_unique<Library>();
  const auto bus = pci_bus_id(device);
  void* gpu = nullptr;
  if (bus.empty() || !library->open() || library->find_by_pci(bus.c_str(), &gpu) != kNvmlSuccess) {
    log_debug(text("no figures of GPU ", device.str(), ": NVML (libnvidia-ml.so.1) does not find it"));
    return nullptr;
  }
  return std::unique_ptr<GpuMonitor>(new GpuMonitor(std::move(library), gpu));
}

GpuMonitor::GpuMonitor(std::unique_ptr<Library> library, void* gpu) : library_(std::move(library)), gpu_(gpu) {}
GpuMonitor::~GpuMonitor() = default;

std::optional<GpuStatus> GpuMonitor::read() const {
  std::array<char, 96> name{};
  NvmlUtilization utilization{};
  NvmlMemory memory{};
  if (library_->get_name(gpu_, name.data(), name.size()) != kNvmlSuccess ||
      library_->get_utilization(gpu_, &utilization) != kNvmlSuccess ||
      library_->get_memory(gpu_, &memory) != kNvmlSuccess)
    return std::nullopt;
  return GpuStatus{.name = name.data(),
                   .utilization = utilization.gpu / 100.0,
                   .memory_used_bytes = static_cast<int64_t>(memory.used),
                   .memory_total_bytes = static_cast<int64_t>(memory.total)};
}

}  // namespace lockstep::detail
