#pragma once

#include <string>

#include <c10/core/Device.h>

namespace lockstep::nccl {

/// How many GPUs this process may use; 0 where there is no driver.
int visible_gpus();

/// What tells the GPU from all others of this host.
std::string bus_id(c10::Device gpu);

/// Makes it the calling thread's current device.
void make_current(c10::Device gpu);

/// Whether the calling thread's current stream is being captured into a CUDA graph.
bool is_capturing(c10::Device gpu);

}  // namespace lockstep::nccl
