#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/environment.h>
#include <lockstep/launch_options.h>

#include "launch/crew.h"
#include "launch/machine.h"
#include "launch/nodes.h"
#include "rendezvous/net/socket.h"

namespace lockstep {

/// Which streams of a worker go where.
struct OutputRoute {
  bool to_console = true;
  bool to_file = false;

  bool operator==(const OutputRoute&) const = default;
};

struct OutputRoutes {
  OutputRoute out, err;
};

/// What one node starts, decided from the options, the host and the environment alone.
struct Plan {
  int workers = 1;                      // on this node
  int threads = 0;                      // OMP_NUM_THREADS of each; 0: left as it is
  std::vector<std::vector<int>> cores;  // of each
  std::vector<OutputRoutes> routes;     // of each
  NodePlace node;                       // this one among all
  std::string job_id;
};

/// UsageError, naming the option and the remedy, when they make no sense together.
Plan make_plan(const LaunchOptions& options, const Machine& machine, const Environment::Lookup& lookup);

/// How the workers of one attempt stand among those of all nodes.
struct Layout {
  int first_rank = 0;
  int world_size = 1;
  int generation = 0;
  Endpoint store;  // where the ranks meet
  std::string job_id;

  bool operator==(const Layout&) const = default;
};

/// What is added to the launcher's own environment for a worker. `secret_file` is empty when the warden names it.
std::map<std::string, std::string> worker_variables(const LaunchOptions& options, const Plan& plan,
                                                    const Layout& layout, int local_rank,
                                                    const std::string& secret_file);

WorkerSpec worker_spec(const LaunchOptions& options, const Plan& plan, const Layout& layout, int local_rank,
                       const std::string& secret_file);

/// What would be started, for people or as one JSON object.
std::string describe_plan(const LaunchOptions& options, const Plan& plan, const Layout& layout);

}  // namespace lockstep
