#pragma once

#include <string>

#include <c10/core/Device.h>

namespace lockstep::nccl {

/// The number of GPUs that this process may use; 0 without a driver.
int visible_gpus();

/// The PCI bus id of the GPU, unique on this host.
std::string bus_id(c10::Device gpu);

/// "9.0".
std::string compute_capability(c10::Device gpu);

/// Makes the GPU the calling thread's current device.
void make_current(c10::Device gpu);

/// Whether the calling thread's current stream is being captured into a CUDA graph.
bool is_capturing(c10::Device gpu);

}  // namespace lockstep::nccl
