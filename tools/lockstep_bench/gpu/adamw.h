#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep::bench {

/// What torch.optim.AdamW(fused=True) does in Python, by the same kernels.
class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> parameters);

  void release_gradients();
  /// Every parameter has a gradient.
  void step();

 private:
  const std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> means_, squares_, steps_;
};

}  // namespace lockstep::bench
