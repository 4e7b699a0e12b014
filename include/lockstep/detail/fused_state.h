#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace lockstep::detail {

class DeviceState;
class MasterWeights;
/// Copies the step counts of a fused optimizer from the GPU to its states. Does nothing for other optimizers.
void read_step_counts(const torch::optim::Optimizer& optimizer);

/// The part that all fused optimizers have.
struct FusedAccess;
struct FusedState {
  std::shared_ptr<DeviceState> device;
  std::shared_ptr<MasterWeights> masters;  // null without master weights
  at::Tensor skip;                         // during step_unless() on a GPU
};

}  // namespace lockstep::detail
