#include "backends/mpi/mpi_backend.h"

#include "backends/messages/message_backend.h"
#include "backends/mpi/mpi_link.h"

namespace lockstep {

std::unique_ptr<Backend> make_mpi_backend(const BackendContext& context) {
  return std::make_unique<messages::MessageBackend<mpi::MpiLink>>(context);
}

}  // namespace lockstep
