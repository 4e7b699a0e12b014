#include "comm/setup/choose_device.h"

#include <dirent.h>

#include <memory>

#include <lockstep/error.h>

#include "base/log.h"
#include "base/text.h"
#ifdef LOCKSTEP_HAVE_NCCL
#include "backends/nccl/gpu.h"
#endif

namespace lockstep::detail {
namespace {

#ifdef LOCKSTEP_HAVE_NCCL
using nccl::make_current;
using nccl::visible_gpus;
std::string capability_of(c10::Device gpu) {
  return nccl::compute_capability(gpu);
}
constexpr bool kHasNccl = true;
#else
int visible_gpus() {
  return 0;
}
void make_current(c10::Device) {}
std::string capability_of(c10::Device) {
  return "";
}
constexpr bool kHasNccl = false;
#endif

/// Also counts GPUs that are not visible to this process.
int gpus_on_host() {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/driver/nvidia/gpus"), ::closedir);
  int count = 0;
  while (const auto* entry = folder ? ::readdir(folder.get()) : nullptr)
    if (entry->d_name[0] != '.') ++count;
  return count;
}

c10::Device checked_gpu(c10::Device device) {
  if (!kHasNccl)
    throw UsageError(
        text("init_process_group: device is ", device,
             ", but this build has no backend for it (nccl); run lockstep doctor, which names what is missing"));
  const int gpus = visible_gpus();
  const int index = device.has_index() ? device.index() : 0;
  if (index >= gpus)
    throw UsageError(text("init_process_group: device is ", device, ", but this process sees ", gpus,
                          gpus == 1 ? " GPU" : " GPUs", "; check nvidia-smi and CUDA_VISIBLE_DEVICES"));
  const c10::Device gpu(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  make_current(gpu);
  return gpu;
}

c10::Device choose(const ProcessGroupOptions& options, const BackendNames& backends) {
  if (backends.cuda.empty()) return c10::kCPU;
  const int gpus = visible_gpus();
  if (gpus == 0 && !backends.cpu.empty()) return c10::kCPU;
  if (options.rank && options.world_size > 1) {  // it is not known yet which ranks share this host
    if (!backends.cpu.empty()) return c10::kCPU;
    throw UsageError(
        "init_process_group: rank is given without .device; set .device to the GPU of this rank. lockstep can choose "
        "the GPU only if the rank comes from the launcher's variables");
  }
  const auto environment = options.rank ? Environment() : Environment::detect();
  const GpuCount count{.visible = gpus, .on_host = gpus_on_host()};
  if (const auto gpu = gpu_of_rank(count, environment.local_rank, environment.local_world_size))
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(*gpu)};
  if (backends.cpu.empty())
    throw UsageError(text("init_process_group: backend nccl needs one GPU for each rank, but ",
                          environment.local_world_size, " ranks on this host see ", gpus,
                          " GPUs; start fewer ranks, or set .device if each rank sees its own GPU"));
  if (environment.local_rank == 0)
    log_warning(text("rank ", environment.rank, ": ", environment.local_world_size, " ranks on this host see ", gpus,
                     " GPUs, so they train on the CPU. To train on the GPUs, start at most one rank for each"));
  return c10::kCPU;
}

}  // namespace

std::optional<int> gpu_of_rank(const GpuCount& gpus, int local_rank, int local_ranks) {
  if (gpus.visible >= local_ranks && gpus.visible > 0) return local_rank;
  if (gpus.visible == 1 && gpus.on_host >= local_ranks) return 0;
  return std::nullopt;
}

c10::Device choose_device(const ProcessGroupOptions& options, const BackendNames& backends) {
  const auto device = options.device ? *options.device : choose(options, backends);
  if (!device.is_cpu() && !device.is_cuda())
    throw UsageError(text("init_process_group: device is ", device, "; only cpu and cuda are supported"));
  if ((device.is_cpu() ? backends.cpu : backends.cuda).empty())
    throw UsageError(text("init_process_group: device is ", device, ", but backend ", options.backend,
                          " does not support that device; for both devices use \"cpu:gloo,cuda:nccl\", or auto"));
  return device.is_cpu() ? device : checked_gpu(device);
}

int usable_gpus() {
  return visible_gpus();
}

std::string compute_capability(c10::Device gpu) {
  return capability_of(gpu);
}

}  // namespace lockstep::detail
