#pragma once

#include <lockstep/optimizer_state.h>

namespace lockstep::detail {

/// UsageError unless the state can be one of this optimizer's parameters.
void check_fits(const torch::optim::Optimizer& optimizer, const OptimizerState& state);

}  // namespace lockstep::detail
