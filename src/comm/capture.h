#pragma once

#include <c10/core/Device.h>

namespace lockstep::detail {

/// Whether the calling thread's current stream on that device is being captured into a CUDA graph.
bool is_capturing(c10::Device device);

}  // namespace lockstep::detail
