#pragma once

#include <lockstep/backend.h>

#include "backends/mpi/mpi.h"

namespace lockstep::mpi {

/// The communicators of one group, used only by that group. Their ranks are those of the group.
struct Communicators {
  MPI_Comm collectives = MPI_COMM_NULL;
  MPI_Comm messages = MPI_COMM_NULL;
  int tag_bits = 0;  // usable bits of a tag
};

/// Collective over the group. Throws UsageError when mpirun did not start this process, when several mpirun started the
/// ranks, or when two ranks are the same process of mpirun.
Communicators make_communicators(const BackendContext& context);

/// Not collective in the MPI implementations: messages in transit still arrive. Does nothing after MPI_Finalize.
void free(Communicators& communicators) noexcept;

}  // namespace lockstep::mpi
