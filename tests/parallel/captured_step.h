#pragma once

#include <functional>

#include <ATen/cuda/CUDAGraph.h>
#include <torch/cuda.h>

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
