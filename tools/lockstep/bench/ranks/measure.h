#pragma once

#include <functional>

#include <lockstep/process_group.h>

#include "bench/rank_protocol.h"
#include "bench/ranks/shared_page.h"

namespace lockstep::bench {

/// Executes the plan on all ranks of `world`, whose backend is the first of the plan. Collective. Calls `report` on
/// rank 0 for each message, outside of timed sections.
void measure_collective(const CollectivePlan& plan, const ProcessGroup& world, SharedPage& page,
                        const std::function<void(const CollectiveMessage&)>& report);

/// Executes the plan on all ranks of `world`. Collective. Calls `report` on rank 0 for each message, outside of timed
/// sections.
void measure_ddp(const DdpPlan& plan, const ProcessGroup& world, SharedPage& page,
                 const std::function<void(const DdpMessage&)>& report);

}  // namespace lockstep::bench
