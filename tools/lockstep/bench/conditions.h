#pragma once

#include <string>
#include <vector>

#include "bench/arguments.h"
#include "bench/run_plan.h"
#include "doctor/machine.h"

namespace lockstep::bench {

/// Under which everything is measured: the program of the ranks, what it can do, and the cores that it gets.

/// Where lockstep-bench is. SystemError when it is missing.
std::string find_program();

/// The backends of this build, as lockstep-bench tells.
std::vector<std::string> ask_backends(const std::string& program);

/// Why `mpi` cannot be measured where there is no mpirun.
inline constexpr const char* kNoMpirun =
    "its ranks are started by mpirun, which is not in PATH (apt-get install openmpi-bin)";

/// For when `option` asks for mpi. UsageError where there is no mpirun.
void require_mpirun(const std::string& option);

/// Gives each rank cores of its own where there are enough, and the user lets it.
void settle_on_cores(RunPlan& plan, const Arguments& arguments, const tool::Machine& machine);

/// "2 ranks of 1 thread on 2 cores of Neoverse-V1, pinned".
std::string describe_conditions(const RunPlan& plan, int threads, const tool::Machine& machine);

}  // namespace lockstep::bench
