#pragma once

#include <memory>
#include <string>

#include <lockstep/process_group.h>

#include "bench/plan.h"
#include "bench/ranks/side.h"

namespace lockstep::bench {

/// Calls of one collective, a barrier excepted, of one backend on messages of one size, in one kind of memory.
std::unique_ptr<Side> make_collective(const Plan& plan, const ProcessGroup& group, Memory memory, int64_t bytes);

/// Whether the group's memory is another than LibTorch's own.
bool has_own_memory(const ProcessGroup& group);

}  // namespace lockstep::bench
