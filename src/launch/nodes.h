#pragma once

#include <lockstep/environment.h>
#include <lockstep/launch_options.h>

#include "rendezvous/net/socket.h"

namespace lockstep {

/// The rank of this node in the job, and the address at which node 0 listens.
struct NodePlace {
  int nodes = 1;
  int rank = 0;
  Endpoint store;  // port 0: the system chooses

  bool operator==(const NodePlace&) const = default;
};

/// Determines this node's place from the options. Values that they do not set come from the environment of the program
/// that started one launcher per node:
///   1. mpirun or srun: the number of launchers and the index of this launcher. Ignored in a worker of another launcher
///      (RANK and WORLD_SIZE are set), because the variables then describe that launcher.
///   2. Kubernetes: JOB_COMPLETION_INDEX is the node's rank, if the options give the number of nodes.
///   3. MASTER_ADDR and MASTER_PORT, if there is more than one node. The default address is the first host of Slurm's
///      list, or loopback if all launchers are on this host; the default port is derived from the job's name, or 29500.
/// Throws UsageError, naming the option or variable and the remedy. Reads the environment only through `lookup`.
NodePlace find_node(const LaunchOptions& options, const Environment::Lookup& lookup);

}  // namespace lockstep
