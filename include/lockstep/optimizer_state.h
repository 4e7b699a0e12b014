#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/export.h>

namespace lockstep {

/// What an optimizer knows beside its parameters, in the layout of Python's state_dict(): parameters are numbered
/// through all groups, and names are those of torch.optim ("exp_avg", "lr", "betas").
struct OptimizerState {
  using Values = std::map<std::string, c10::IValue>;

  struct Group {
    Values options{};
    std::vector<int64_t> parameters{};
    std::vector<std::string> names{};  // of the parameters; empty where they are not known
  };

  std::map<int64_t, Values> parameters{};  // only of those that have been stepped
  std::vector<Group> groups{};
};

/// A copy of what the optimizer knows, on the CPU. For LibTorch's optimizers, ours, and any that implements save() as
/// they do.
LOCKSTEP_EXPORT OptimizerState state_dict(const torch::optim::Optimizer& optimizer);

/// Lets an optimizer go on from there, options included, on the device of its parameters, which must be one.
/// UsageError, before anything changes, when the state is of other parameters, of another kind of optimizer, or says
/// what LibTorch's optimizers cannot do. A step of one of ours that was captured must be captured again.
LOCKSTEP_EXPORT void load_state_dict(torch::optim::Optimizer& optimizer, const OptimizerState& state);

}  // namespace lockstep
