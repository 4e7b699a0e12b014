#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/export.h>
#include <lockstep/state_traits.h>
#include <lockstep/value.h>

namespace lockstep {

/// The state of an optimizer, in the layout of Python's state_dict(). Parameters are numbered consecutively across all
/// groups. Names are those of torch.optim ("exp_avg", "lr", "betas").
struct OptimizerState {
  using Values = std::map<std::string, c10::IValue>;

  struct Group {
    Values options{};
    std::vector<int64_t> parameters{};
    std::vector<std::string> names{};  ///< names of the parameters; empty if unknown
  };

  std::map<int64_t, Values> parameters{};  ///< only parameters that have been updated at least once
  std::vector<Group> groups{};
};

/// Returns a copy of the optimizer's state, on the CPU. For LibTorch's optimizers, lockstep's, and any optimizer whose
/// save() has LibTorch's format. Not collective.
LOCKSTEP_EXPORT OptimizerState state_dict(const torch::optim::Optimizer& optimizer);

/// Loads a state and options into an optimizer, on the device of its parameters, which must all be on one device. Not
/// collective. Throws UsageError, and changes nothing, if the state belongs to other parameters or another kind of
/// optimizer, or uses an option that LibTorch's optimizers do not have (maximize). A captured step of a fused optimizer
/// must be captured again.
LOCKSTEP_EXPORT void load_state_dict(torch::optim::Optimizer& optimizer, const OptimizerState& state);

/// The state as a Value, as Python's torch.save would save it, and back. The tensors are shared. to_optimizer_state()
/// also reads what Python's torch.save has saved. It throws UsageError if the value has another layout.
LOCKSTEP_EXPORT Value to_value(const OptimizerState& state);
LOCKSTEP_EXPORT OptimizerState to_optimizer_state(const Value& value);

/// Returns the state of an optimizer as a Value. For the optimizers of LibTorch and lockstep, the tensors are those of
/// the optimizer, not copies. Not collective.
LOCKSTEP_EXPORT Value state_value(const torch::optim::Optimizer& optimizer);

template <std::derived_from<torch::optim::Optimizer> T>
requires(!detail::HasStateDict<T>) struct StateTraits<T> {
  static Value save(const T& optimizer) { return state_value(optimizer); }
  static void load(T& optimizer, const Value& value) { load_state_dict(optimizer, to_optimizer_state(value)); }
};

}  // namespace lockstep
