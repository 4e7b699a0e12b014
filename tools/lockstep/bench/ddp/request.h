#pragma once

#include <string>
#include <vector>

#include "bench/ddp/plan.h"
#include "bench/request.h"

namespace lockstep::bench {

/// Pure. `available` are the backends that this build has. UsageError naming the option, what came and what it should
/// be, also for an option that says nothing about training. Which Python is compared with stays open.
DdpPlan make_ddp_plan(const Request& request, const std::vector<std::string>& available);

}  // namespace lockstep::bench
