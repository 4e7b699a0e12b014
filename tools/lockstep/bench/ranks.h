#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/launcher.h>

#include "bench/messages.h"
#include "bench/plan.h"

namespace lockstep::bench {

struct RankOptions {
  std::string program{};  // lockstep-bench
  int threads = 1;        // of each rank
};

/// How the ranks are started: by our launcher, or by mpirun under it when `mpi` is to be measured, which can be started
/// in no other way. Our launcher hosts the store in both cases. Pure.
LaunchOptions rank_launch(const Plan& plan, const RankOptions& options);

/// Runs the plan. `on_message` gets what rank 0 says, on a thread of its own, before this returns. Returns the
/// launcher's exit code; says on stderr what went wrong.
int run_ranks(Plan plan, const RankOptions& options, const std::function<void(const Message&)>& on_message);

}  // namespace lockstep::bench
