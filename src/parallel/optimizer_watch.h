#pragma once

#include <memory>
#include <string>

#include <ATen/record_function.h>

namespace lockstep::detail {

/// During its lifetime, detects LibTorch's optimizers that make a step on this thread. They count steps and keep
/// learning rates on the host, so they cannot be part of a CUDA graph. Slow: for the capture of a step only.
class OptimizerWatch {
 public:
  OptimizerWatch();
  ~OptimizerWatch();
  OptimizerWatch(const OptimizerWatch&) = delete;
  OptimizerWatch& operator=(const OptimizerWatch&) = delete;

  /// Returns the class of the first such optimizer, for example "torch::optim::Adam"; empty if there was none.
  const std::string& found() const { return found_; }

 private:
  static std::unique_ptr<at::ObserverContext> on_operation(const at::RecordFunction& operation);

  std::string found_{};
  OptimizerWatch* const outer_;
  const at::CallbackHandle callback_;
};

}  // namespace lockstep::detail
