#pragma once

#include "optim/zero/sharded_parameters.h"

namespace lockstep::detail {

/// Compares sum and norm of the parameters and their gradients over the ranks. Throws MismatchError on all ranks if
/// they differ by more than rounding: each rank updates a part of a parameter, so the all-gather would mix the ranks'
/// values. Returns false if a gradient is not finite, so that differences cannot be seen. Collective.
bool check_alike_on_all_ranks(const ShardedParameters& parameters);

}  // namespace lockstep::detail
