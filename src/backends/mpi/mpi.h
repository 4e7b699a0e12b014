#pragma once

// MPI's header without the C++ bindings, which are deprecated and would need a library.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <string>

namespace lockstep::mpi {

/// Returns MPI's description of an error code.
std::string describe_error(int code);

/// Throws SystemError naming the call, unless the code is MPI_SUCCESS.
void check(int code, const char* call);

}  // namespace lockstep::mpi
