#include "comm/mpi/mpi_backend.h"

#include "comm/direct/direct_backend.h"
#include "comm/mpi/mpi_link.h"

namespace lockstep {

std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context) {
  return std::make_unique<direct::DirectBackend<mpi::MpiLink>>(context);
}

}  // namespace lockstep
