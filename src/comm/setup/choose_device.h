#pragma once

#include <optional>
#include <string>

#include <lockstep/environment.h>
#include <lockstep/process_group.h>

#include "comm/setup/backend_choice.h"

namespace lockstep::detail {

struct GpuCount {
  int visible = 0;  // to this process
  int on_host = 0;
};

/// Returns the index of this rank's GPU among the visible GPUs: its local rank, or 0 when exactly one GPU is visible
/// and the host has one for each rank (a scheduler or container gives each rank its own). nullopt when there are too
/// few GPUs. Pure.
std::optional<int> gpu_of_rank(const GpuCount& gpus, int local_rank, int local_ranks);

/// Chooses the device of this rank's tensors: options.device if set, else the GPU of its local rank if the host has a
/// GPU for each rank, else the CPU. Makes a chosen GPU the calling thread's current device. Throws UsageError when the
/// backends do not support the device.
c10::Device choose_device(const ProcessGroupOptions& options, const BackendNames& backends);

/// The number of GPUs that this process can use: 0 in a build without nccl.
int usable_gpus();

/// The compute capability of one of them: "9.0".
std::string compute_capability(c10::Device gpu);

}  // namespace lockstep::detail
