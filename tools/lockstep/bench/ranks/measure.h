#pragma once

#include <functional>

#include <lockstep/process_group.h>

#include "bench/rank_protocol.h"
#include "bench/ranks/shared_page.h"

namespace lockstep::bench {

/// Carries the plan out over all ranks of `world`, whose backend is the plan's first. Collective. `report` is called on
/// rank 0, for each message, outside of what is timed.
void measure_collective(const CollectivePlan& plan, const ProcessGroup& world, SharedPage& page,
                        const std::function<void(const CollectiveMessage&)>& report);

/// Carries the plan out over all ranks of `world`. Collective. `report` is called on rank 0, for each message, outside
/// of what is timed.
void measure_ddp(const DdpPlan& plan, const ProcessGroup& world, SharedPage& page,
                 const std::function<void(const DdpMessage&)>& report);

}  // namespace lockstep::bench
