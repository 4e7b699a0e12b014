#pragma once

#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace lockstep::detail {

/// State of a fused optimizer in GPU memory, in addition to the states of its parameters: the learning rate of each
/// group and the step count of each parameter. A captured step reads both from GPU memory. Not thread-safe.
class DeviceState {
 public:
  explicit DeviceState(torch::optim::Optimizer& optimizer) : optimizer_(&optimizer) {}

  /// Call it when the optimizer is destroyed or its state is replaced: captured steps must not be replayed afterwards.
  void release() { optimizer_ = nullptr; }
  bool is_released() const { return optimizer_ == nullptr; }
  /// The options of each group except the learning rate: momentum, betas and the like. A captured step contains them.
  using ConstantOptions = std::vector<std::vector<double>>;
  /// Call it when a step of the optimizer is captured. Returns the options that it contains.
  ConstantOptions note_capture();
  bool is_captured() const { return is_captured_; }

  /// Returns the learning rate of a group as a scalar on `device`. Updates it from the optimizer's options first,
  /// unless a step is being captured. Throws UsageError if the tensor would have to be created during capture.
  const at::Tensor& rate(size_t group, c10::Device device);
  /// Returns the step count of a parameter as a scalar on its device. The first call initializes it with `steps`;
  /// afterwards only the GPU changes it.
  const at::Tensor& steps(const at::Tensor& parameter, int64_t steps);
  void forget_steps(const at::Tensor& parameter) { steps_.erase(parameter.unsafeGetTensorImpl()); }
  /// Reads the step count from the GPU; blocks. Precondition: counts(parameter).
  int64_t read_step_count(const at::Tensor& parameter) const;
  /// Whether the GPU counts the steps of the parameter.
  bool counts(const at::Tensor& parameter) const { return steps_.count(parameter.unsafeGetTensorImpl()) > 0; }

  /// Call it before a replay of a step that contains the options `captured`; without an argument, the options of the
  /// last note_capture(). Updates all learning rates from the optimizer's options. Throws UsageError after release(),
  /// and if another option changed after the capture.
  void refresh(const ConstantOptions& captured);
  void refresh() { refresh(last_captured_); }

 private:
  struct Rate {
    size_t group;
    at::Tensor tensor;
    double value;  // of `tensor`
  };

  torch::optim::Optimizer* optimizer_;  // null after release()
  bool is_captured_ = false;
  ConstantOptions last_captured_;
  std::vector<Rate> rates_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> steps_;
};

}  // namespace lockstep::detail
