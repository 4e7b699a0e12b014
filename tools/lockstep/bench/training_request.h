#pragma once

#include <string>
#include <vector>

#include "bench/request.h"

namespace lockstep::bench {

/// What ddp and gpu, which train models, have in common. Both throw UsageError naming the option.

/// Refuses options that say nothing about training.
void refuse_message_options(const Request& request);

/// Those that are wanted, in that order; all that are known when none is.
std::vector<std::string> choose_models(const std::vector<std::string>& wanted, const std::vector<std::string>& known);

}  // namespace lockstep::bench
