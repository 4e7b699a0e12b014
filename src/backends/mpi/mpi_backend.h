#pragma once

#include <memory>

#include <lockstep/backend.h>

namespace lockstep {

/// Processes that mpirun started, over whatever network MPI uses. Collective.
///
/// MPI carries the messages; the algorithms are ours. Its own would have to be waited for without a way out when a rank
/// is gone, reduce in an order of their own, and have neither AVG nor half precision.
std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context);

}  // namespace lockstep
