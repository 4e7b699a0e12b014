#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

namespace lockstep::bench {

/// A model with its batch. Weights and batch are random, but the same in every run. gpu_trainer.py creates the same
/// weights and batch, bit for bit.
struct GpuTask {
  torch::nn::Sequential model;
  at::Tensor input, target;
  bool in_bfloat16 = false;  // by autocast; else float32, multiplied in TF32
};

/// Creates the task of this name, one of gpu_model_names(), on the CPU.
GpuTask make_gpu_task(const std::string& name);

/// The names of the GPUs that can be measured; empty if LibTorch is too old for the models.
std::vector<std::string> usable_gpus();

/// Trains on the first GPU as requested on stdin, until stdin ends. `side` is plain, ddp, captured, compiled or
/// compiled-captured. gpu_trainer.py does the same in Python and documents the requests.
void serve_trainer(const std::string& side);

}  // namespace lockstep::bench
