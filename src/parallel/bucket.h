#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/process_group.h>

namespace lockstep {

/// Gradients that are reduced together, in one piece of the backend's memory. Not thread-safe.
class Bucket {
 public:
  /// `parameters` of one dtype and device; `extra` more elements follow the gradients.
  Bucket(const ProcessGroup& group, const std::vector<at::Tensor>& parameters, int64_t extra);

  /// A tensor of the shape and strides of parameter `slot` in the bucket's memory. Not an autograd view: optimizers
  /// detach gradients in place, which those refuse.
  const at::Tensor& gradient(size_t slot) const { return gradients_[slot]; }

  /// The elements after the gradients.
  const at::Tensor& extra() const { return extra_; }

  /// All gradients are missing again.
  void reset() { missing_ = gradients_.size(); }
  /// One more gradient is in place.
  void fill() { --missing_; }
  bool is_full() const { return missing_ == 0; }

  void start_average();
  void finish_average();

 private:
  ProcessGroup group_;
  at::Tensor memory_;
  std::vector<at::Tensor> gradients_;
  at::Tensor extra_;
  size_t missing_ = 0;
  std::optional<Work> average_;
};

}  // namespace lockstep
