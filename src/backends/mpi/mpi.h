#pragma once

// MPI's header without its C++ bindings, which are deprecated and would have to be linked.
#define OMPI_SKIP_MPICXX 1
#define MPICH_SKIP_MPICXX 1
#include <mpi.h>

#include <string>

namespace lockstep::mpi {

/// What MPI says about one of its error codes.
std::string describe_error(int code);

/// SystemError, naming the call, unless the code is that of success.
void check(int code, const char* call);

}  // namespace lockstep::mpi
