#pragma once

#include <optional>
#include <string>

#include "doctor/finding.h"
#include "doctor/machine.h"

namespace lockstep::tool {

// Facts in, a finding out: pure, and tested with facts that are made up. `ranks` are those on this host, `world_size`
// those of the job.

Finding judge_cores(const Machine& machine, int ranks);

/// `variable`: the value of OMP_NUM_THREADS.
Finding judge_threads(const Machine& machine, int ranks, const std::optional<std::string>& variable);

Finding judge_memory(const Machine& machine, int ranks);
Finding judge_numa(const Machine& machine, int ranks);

/// `serves_nccl`: whether NCCL's ranks on this host would use it.
Finding judge_shared_memory(const Machine& machine, bool serves_nccl);

Finding judge_open_files(const Machine& machine, int world_size);
Finding judge_processes(const Machine& machine, int ranks);
Finding judge_locked_memory(const Machine& machine);
Finding judge_clock(const Machine& machine, bool beyond_this_host);

}  // namespace lockstep::tool
