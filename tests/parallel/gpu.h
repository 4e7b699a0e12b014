#pragma once

#include <functional>

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/cuda.h>

/// What the tests on a GPU share.
inline const torch::Device kGpu(torch::kCUDA, 0);

/// While it lives, LibTorch refuses every call that blocks the host until the GPU is done.
struct NoWaiting {
  NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_ERROR); }
  ~NoWaiting() { c10::cuda::warning_state().set_sync_debug_mode(c10::cuda::SyncDebugMode::L_DISABLED); }
};

/// Captures the step on the current stream, which cannot be the default one, and replays it so often.
inline void capture_and_replay(const std::function<void()>& step, int replays) {
  torch::cuda::synchronize();
  at::cuda::CUDAGraph graph;
  graph.capture_begin();
  step();
  graph.capture_end();
  for (int i = 0; i < replays; ++i) graph.replay();
  torch::cuda::synchronize();
}
