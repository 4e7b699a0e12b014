#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/environment.h>
#include <lockstep/launch_options.h>

#include "launch/machine.h"
#include "launch/nodes.h"
#include "launch/worker_processes.h"
#include "rendezvous/net/socket.h"

namespace lockstep {

/// The destinations of one output stream of a worker.
struct OutputRoute {
  bool to_console = true;
  bool to_file = false;

  bool operator==(const OutputRoute&) const = default;
};

struct OutputRoutes {
  OutputRoute out, err;
};

/// The workers that one node starts, determined by the options, the host and the environment.
struct Plan {
  int workers = 1;                      // on this node
  int threads = 0;                      // OMP_NUM_THREADS of each worker; 0: unchanged
  std::vector<std::vector<int>> cores;  // per worker
  std::vector<OutputRoutes> routes;     // per worker
  NodePlace node;
  std::string job_id;
};

/// Throws UsageError, naming the option and the remedy, if the options are invalid or contradict each other.
Plan make_plan(const LaunchOptions& options, const Machine& machine, const Environment::Lookup& lookup);

/// The position of this node's workers among the workers of all nodes, for one attempt.
struct Layout {
  int first_rank = 0;
  int world_size = 1;
  int generation = 0;
  Endpoint store;  // of the ranks
  std::string job_id;

  bool operator==(const Layout&) const = default;
};

/// Returns the variables that a worker has in addition to the launcher's environment. `secret_file` is empty if the
/// supervisor sets that variable.
std::map<std::string, std::string> worker_variables(const LaunchOptions& options, const Plan& plan,
                                                    const Layout& layout, int local_rank,
                                                    const std::string& secret_file);

WorkerSpec worker_spec(const LaunchOptions& options, const Plan& plan, const Layout& layout, int local_rank,
                       const std::string& secret_file);

/// Describes the workers for --dry-run, as text or as one JSON object.
std::string describe_plan(const LaunchOptions& options, const Plan& plan, const Layout& layout);

}  // namespace lockstep
