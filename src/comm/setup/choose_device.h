#pragma once

#include <optional>

#include <lockstep/environment.h>
#include <lockstep/process_group.h>

#include "comm/setup/backend_choice.h"

namespace lockstep::detail {

struct GpuCount {
  int visible = 0;  // to this process
  int on_host = 0;
};

/// Which of the visible GPUs is this rank's: that of its local rank, or the only one, where the host has one for each
/// rank and a scheduler or container shows each rank its own. None when there are too few. Pure.
std::optional<int> gpu_of_rank(const GpuCount& gpus, int local_rank, int local_ranks);

/// Where this rank's tensors live: what the user asks for, else the GPU of its local rank when there is one for each
/// rank of this host, else the CPU. A GPU becomes the calling thread's current one. UsageError when the backends do not
/// move tensors there.
c10::Device choose_device(const ProcessGroupOptions& options, const BackendNames& backends);

}  // namespace lockstep::detail
