#pragma once

#include <c10/cuda/CUDAFunctions.h>

/// While it lives, LibTorch refuses whatever makes the host wait for the GPU.
struct NoWaiting {
  NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};
