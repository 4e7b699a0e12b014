#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/launcher.h>

#include "bench/run_plan.h"

namespace lockstep::bench {

struct RankOptions {
  std::vector<std::string> command{};  // lockstep-bench, and what stands before the plan
  int threads = 1;                     // of each rank
  bool by_mpirun = false;              // the ranks of `mpi` can be started in no other way
};

/// How `ranks` ranks are started with this plan: by our launcher, or by mpirun under it. Our launcher hosts the store
/// in both cases. Pure.
LaunchOptions rank_launch(int ranks, const std::string& plan, const RankOptions& options);

/// Gives the plan its page and its results, and runs ranks with what `text` then makes of it. `on_line` gets what rank
/// 0 says, on a thread of its own, before this returns. Returns the launcher's exit code; says on stderr what went
/// wrong.
int run_ranks(RunPlan& plan, const std::function<std::string()>& text, const RankOptions& options,
              const std::function<void(const std::string&)>& on_line);

}  // namespace lockstep::bench
