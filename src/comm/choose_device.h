#pragma once

#include <lockstep/environment.h>
#include <lockstep/process_group.h>

#include "comm/backend_names.h"

namespace lockstep::detail {

/// Where this rank's tensors live: what the user asks for, else the GPU of its local rank when there is one for each
/// rank of this host, else the CPU. A GPU becomes the calling thread's current one. UsageError when the backends do not
/// move tensors there.
c10::Device choose_device(const ProcessGroupOptions& options, const BackendNames& backends);

}  // namespace lockstep::detail
