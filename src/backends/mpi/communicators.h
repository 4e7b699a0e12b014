#pragma once

#include <lockstep/backend.h>

#include "backends/mpi/mpi.h"

namespace lockstep::mpi {

/// The communicators of one group, which no one else uses; ranks in them are the group's.
struct Communicators {
  MPI_Comm collectives = MPI_COMM_NULL;
  MPI_Comm messages = MPI_COMM_NULL;
  int tag_bits = 0;  // a tag may have
};

/// Collective over the group. UsageError when mpirun did not start this process, or did not start all of them as
/// processes of their own.
Communicators make_communicators(const BackendContext& context);

/// Local, as MPI implements it: messages that are under way arrive. Does nothing once MPI has ended.
void free(Communicators& communicators) noexcept;

}  // namespace lockstep::mpi
