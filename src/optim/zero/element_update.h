#pragma once

#include <array>
#include <string>
#include <variant>
#include <vector>

#include <torch/optim/optimizer.h>

#include "optim/cpu_update.h"

namespace lockstep::detail {

/// One parameter's part of a step of FusedAdamW, FusedAdam or FusedSGD on a CPU, which can be applied to its elements
/// range by range, in any order and on any thread.
class ElementUpdate {
 public:
  /// Memory for a parameter's state, and for a copy of the parameter and its state before the step. All tensors have
  /// the parameter's sizes, dtype and strides.
  struct Memory {
    std::vector<at::Tensor> state{};
    std::vector<at::Tensor> before{};  // the parameter, then its state; empty: keep no copy
    int32_t* saved = nullptr;          // for each kSavedElements: the last step before which they were copied
  };
  static constexpr int64_t kSavedElements = 1024;

  /// Why this optimizer cannot be stepped range by range, for an error message; empty if it can.
  static std::string refusal(const torch::optim::Optimizer& optimizer);
  /// Returns the number of tensors that a parameter's state has with these options.
  static size_t states(const torch::optim::OptimizerOptions& options);

  /// Begins the step of one parameter, which must be dense: counts the step, and moves the state to `memory`, or
  /// creates it there. `step` is the number of the step, for Memory::saved. Requires that refusal() is empty.
  ElementUpdate(torch::optim::Optimizer& optimizer, const torch::optim::OptimizerOptions& options,
                const at::Tensor& parameter, const Memory& memory, int32_t step);

  /// Updates elements, in memory order, from their gradients. Each element must be updated once. `begin` must be a
  /// multiple of kSavedElements. Does not change the parameter's version.
  void apply(int64_t begin, int64_t count, const void* gradient) const;

  /// Undoes the count of the step, or removes the state if this step has created it.
  void undo_step_count() const;

 private:
  static constexpr size_t kMaxTensors = 4;

  std::array<at::Tensor, kMaxTensors> tensors_;  // the parameter, then its state; the rest is undefined
  std::array<at::Tensor, kMaxTensors> before_;   // undefined if there is no copy
  int32_t* saved_;
  int32_t step_;
  torch::optim::Optimizer* optimizer_;  // not null
  bool has_created_state_;
  std::variant<AdamUpdate, SgdUpdate> update_;
};

}  // namespace lockstep::detail
