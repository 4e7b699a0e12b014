#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace lockstep::detail {

/// What a fused optimizer keeps in the memory of GPUs beside the states of its parameters, since a captured step takes
/// it from there: of each group the learning rate, and of each parameter how many steps it has made. Not thread-safe.
class DeviceState {
 public:
  explicit DeviceState(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}

  /// The optimizer is going, or its state was replaced: what was captured must not be replayed any more.
  void release() { optimizer_ = nullptr; }
  bool is_released() const { return optimizer_ == nullptr; }
  /// A step of the optimizer is being captured.
  void note_capture() { is_captured_ = true; }
  bool is_captured() const { return is_captured_; }

  /// The learning rate of a group, there: as it is now, unless a step is being captured.
  const at::Tensor& rate(size_t group, c10::Device device);
  /// How often a parameter was stepped: as `steps` says, at first, and then as the GPU has counted.
  const at::Tensor& steps(const at::Tensor& parameter, int64_t steps);
  void forget_steps(const at::Tensor& parameter) { steps_.erase(parameter.unsafeGetTensorImpl()); }
  /// As the GPU has counted, where it counts(). Waits for it.
  int64_t counted(const at::Tensor& parameter) const;
  bool counts(const at::Tensor& parameter) const { return steps_.count(parameter.unsafeGetTensorImpl()) > 0; }

  /// Learning rates become what they are in the optimizer's options. UsageError when that was released.
  void refresh();

 private:
  struct Rate {
    size_t group;
    at::Tensor there;
    double value;
  };

  torch::optim::Optimizer* optimizer_;
  bool is_captured_ = false;
  std::vector<Rate> rates_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> steps_;
};

}  // namespace lockstep::detail
