#pragma once

#include <string>

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

}  // namespace lockstep::bench
