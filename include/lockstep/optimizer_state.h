#pragma once

#include <concepts>

#include <torch/optim/optimizer.h>

#include <lockstep/export.h>
#include <lockstep/state_traits.h>
#include <lockstep/value.h>

namespace lockstep {

/// Returns the state of an optimizer, as Python's state_dict() has it. Parameters are numbered through all groups, and
/// names are those of torch.optim:
///
///     {"state": {0: {"step": ..., "exp_avg": ...}, 1: ...}, "param_groups": [{"lr": 0.1, ..., "params": [0, 1]}]}
///
/// For the optimizers of LibTorch and lockstep, the tensors are the optimizer's tensors, not copies. Other optimizers
/// need a save() of LibTorch's format. Not collective.
LOCKSTEP_EXPORT Value state_dict(const torch::optim::Optimizer& optimizer);

/// Copies a state and its options into an optimizer, on the device of its parameters, which must all be on one device.
/// `state` is a state_dict() of lockstep or Python. Not collective. Throws UsageError, and changes nothing, if the
/// state belongs to other parameters or another kind of optimizer, or uses an option that LibTorch's optimizers do not
/// have (maximize). A captured step of a fused optimizer must be captured again.
LOCKSTEP_EXPORT void load_state_dict(torch::optim::Optimizer& optimizer, const Value& state);

template <std::derived_from<torch::optim::Optimizer> T>
requires(!detail::HasStateDict<T>) struct StateTraits<T> {
  static Value save(const T& optimizer) { return state_dict(optimizer); }
  static void load(T& optimizer, const Value& value) { load_state_dict(optimizer, value); }
};

}  // namespace lockstep
