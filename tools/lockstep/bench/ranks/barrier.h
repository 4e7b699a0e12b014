#pragma once

#include <memory>

#include <lockstep/process_group.h>

#include "bench/ranks/common_page.h"
#include "bench/ranks/side.h"

namespace lockstep::bench {

/// Barriers of one backend. To check that they wait, one rank comes late, by turns, to one more that is not timed; a
/// rank that gets past it earlier counts as one wrong element.
std::unique_ptr<Side> make_barrier(const ProcessGroup& group, CommonPage& page);

}  // namespace lockstep::bench
