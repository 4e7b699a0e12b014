#pragma once

#include <lockstep/environment.h>
#include <lockstep/launch_options.h>

#include "rendezvous/net/socket.h"

namespace lockstep {

/// Which of a job's nodes this is, and where node 0 listens.
struct NodePlace {
  int nodes = 1;
  int rank = 0;
  Endpoint store;  // port 0: the system chooses

  bool operator==(const NodePlace&) const = default;
};

/// As the options say. What they leave open comes from what started this launcher once on each node:
///   1. mpirun or srun: how many launchers they started, and which of them this is. Not in a worker of another launcher
///      (RANK and WORLD_SIZE are set), where their variables are about that one.
///   2. Kubernetes: JOB_COMPLETION_INDEX is the node's rank, where the options say how many nodes there are.
///   3. MASTER_ADDR and MASTER_PORT, where there is more than one node. Without them the first host of Slurm's list, or
///      loopback when all launchers are on this host; the port that is derived from the job's name, or 29500.
/// UsageError, naming the option or variable and the remedy. Pure: reads only what `lookup` answers.
NodePlace find_node(const LaunchOptions& options, const Environment::Lookup& lookup);

}  // namespace lockstep
