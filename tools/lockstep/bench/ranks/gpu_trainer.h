#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

namespace lockstep::bench {

/// What a trainer trains: always the same weights and the same random batch. gpu_trainer.py has the same, bit for bit.
struct GpuTask {
  torch::nn::Sequential model;
  at::Tensor input, target;
  bool in_bfloat16 = false;  // by autocast; else float32, multiplied in TF32
};

/// The task of this name, one of gpu_model_names(), on the CPU.
GpuTask make_gpu_task(const std::string& name);

/// The names of the GPUs that can be measured; none where LibTorch is too old for what is trained.
std::vector<std::string> usable_gpus();

/// Trains on the first GPU what it is told on stdin, until that ends; `side` is plain, ddp or captured. gpu_trainer.py
/// does the same in Python, and has the requests.
void serve_trainer(const std::string& side);

}  // namespace lockstep::bench
